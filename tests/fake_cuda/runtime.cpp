// A CUDA runtime that computes nothing. It stands in front of libcudart and cuBLAS (LD_PRELOAD), so that PyTorch's CUDA build
// runs on a machine without a GPU: device memory is host memory, copies are copies, streams and events order them, and kernels
// are only counted.
//
// Two modes (fake_set_lazy):
//   immediate   an operation is carried out when it is given to its stream
//   lazy        an operation is carried out when something waits for it, as late as CUDA allows. Memory of the host that changes
//               between the call of a copy and the copy is a violation: on a GPU, it would be a race. Or one stream is late in this
//               way, and the others do their work as soon as their waits allow (fake_set_late)
//
// Device memory is mapped twice. The address that PyTorch sees cannot be read or written, as on a GPU; copies use the other one.
// Violations are noted, with a sentence each, and do not end the process (fake_violations).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gpu.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGiB = size_t(1) << 30;
constexpr size_t kTotalMemory = 80 * kGiB;
constexpr int kMostViolations = 100;
constexpr int kLate = 20000;  // microseconds

struct Region {       // of device memory
  size_t size;        // as it was asked for
  char* inside;       // the address by which copies reach it
  int device;
};

struct Position {     // in a stream: all operations before it
  cudaStream_t stream = nullptr;
  long count = -1;    // -1: never recorded
};

struct Event {
  Position position;
  double seconds = 0;
};

struct Operation {
  enum Kind { kCopy, kFill, kWait, kCall } kind;
  void* target = nullptr;
  const void* source = nullptr;
  size_t size = 0;
  int value = 0;               // of a fill
  Position position;           // of a wait
  cudaHostFn_t call = nullptr; // of a call on the host
  const void* watched = nullptr;  // memory of the host that must not change before a copy, and its hash at the call
  uint64_t hash = 0;
  long number = 0;             // counts all operations, in the order of their calls
};

struct Stream {
  std::deque<Operation> waiting;
  long given = 0, done = 0;
  bool busy = false;  // with an operation, such as a wait for another stream
};

std::recursive_mutex guard;
std::map<std::string, long> counts;
std::vector<std::string> violations;
std::map<uintptr_t, Region> device_memory;
std::map<uintptr_t, size_t> locked_memory;
std::map<cudaStream_t, Stream> streams;
uintptr_t last_stream = 0x1000;
long operations = 0;
size_t used = 0, limit = 8 * kGiB;
bool lazy = false;
cudaStream_t late = nullptr;  // the only stream that is late in the mode `lazy`; nullptr: all are
int lock_failures = 0;  // page-locks that are still to fail
int malloc_to_fail = -1;  // allocations of device memory before the one that fails; -1: none does
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

using Guard = std::lock_guard<std::recursive_mutex>;

int device_count() {
  const char* given = getenv("FAKE_CUDA_DEVICES");
  return given ? atoi(given) : 1;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void count(const std::string& name, long by = 1) {
  Guard held(guard);
  counts[name] += by;
}

void violation(const std::string& sentence) {
  count("violations");
  if (violations.size() < kMostViolations) violations.push_back(sentence);
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

std::string in_hex(const void* address) {
  char text[32];
  snprintf(text, sizeof text, "%p", address);
  return text;
}

template <typename T>
typename std::map<uintptr_t, T>::iterator region_of(std::map<uintptr_t, T>& memory, uintptr_t address, size_t (*size_of)(const T&)) {
  auto found = memory.upper_bound(address);
  if (found == memory.begin()) return memory.end();
  --found;
  return address < found->first + size_of(found->second) ? found : memory.end();
}

size_t size_of_region(const Region& region) { return region.size; }
size_t size_of_range(const size_t& size) { return size; }

bool is_device(const void* address) {
  return region_of(device_memory, uintptr_t(address), size_of_region) != device_memory.end();
}

bool is_locked(const void* address, size_t size) {  // a range may lie in several locked ranges side by side
  uintptr_t at = uintptr_t(address), end = at + size;
  while (at < end) {
    auto found = region_of(locked_memory, at, size_of_range);
    if (found == locked_memory.end()) return false;
    at = found->first + found->second;
  }
  return true;
}

// The address by which a copy reaches memory: that of the second mapping, for device memory.
char* reach(const void* address, size_t size, const char* what) {
  auto found = region_of(device_memory, uintptr_t(address), size_of_region);
  if (found == device_memory.end()) return (char*)address;
  size_t offset = uintptr_t(address) - found->first;
  if (offset + size > found->second.size)
    violation(std::string(what) + " of " + std::to_string(size) + " bytes leaves its region of device memory");
  return found->second.inside + offset;
}

uint64_t hash_of(const void* memory, size_t size) {
  const unsigned char* bytes = (const unsigned char*)memory;
  uint64_t hash = 1469598103934665603ull;
  size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t word;
    memcpy(&word, bytes + at, 8);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 29;
  }
  for (; at < size; at++) hash = (hash ^ bytes[at]) * 1099511628211ull;
  return hash;
}

void carry_out(const Operation& operation);

bool has_happened(const Position& position) { return position.count < 0 || streams[position.stream].done >= position.count; }

void carry_out_next(Stream& stream) {
  Operation next = stream.waiting.front();
  stream.waiting.pop_front();
  stream.busy = true;
  carry_out(next);
  stream.busy = false;
  stream.done++;
}

// If one stream is late, the others do all that waits for nothing.
void progress() {
  if (!late) return;
  for (bool more = true; more;) {
    more = false;
    for (auto& [handle, stream] : streams)
      while (handle != late && !stream.busy && !stream.waiting.empty()) {
        const Operation& next = stream.waiting.front();
        if (next.kind == Operation::kWait && !has_happened(next.position)) break;
        carry_out_next(stream);
        more = true;
      }
  }
}

// Carry out what a stream was given up to a position, and what that waits for. Streams that are not late are as far ahead as they can
// be behind each operation.
void advance(const Position& position) {
  Stream& stream = streams[position.stream];
  while (stream.done < position.count && !stream.busy && !stream.waiting.empty()) {
    carry_out_next(stream);
    progress();
  }
}

void advance_all() {
  for (auto& [handle, stream] : streams) advance({handle, stream.given});
}

bool overlaps(const void* a, size_t a_size, const void* b, size_t b_size) {
  return uintptr_t(a) < uintptr_t(b) + b_size && uintptr_t(b) < uintptr_t(a) + a_size;
}

// A copy of the device has written into memory of the host: later copies that read it are to find these bytes.
void device_wrote(const void* target, size_t size) {
  for (auto& [handle, stream] : streams)
    for (auto& operation : stream.waiting)
      if (operation.watched && overlaps(target, size, operation.watched, operation.size))
        operation.hash = hash_of(operation.watched, operation.size);
}

// A copy reads memory that an earlier call was to fill, in another stream for which it does not wait.
void check_filled(const Operation& reader) {
  for (auto& [handle, stream] : streams)
    for (auto& operation : stream.waiting)
      if (operation.kind == Operation::kCopy && operation.number < reader.number &&
          overlaps(reader.source, reader.size, operation.target, operation.size)) {
        violation("a copy of " + std::to_string(reader.size) + " bytes reads memory that an earlier copy has still to fill: no wait is between them");
        return;
      }
}

void carry_out(const Operation& operation) {
  switch (operation.kind) {
    case Operation::kWait:
      advance(operation.position);
      break;
    case Operation::kCall:
      operation.call(operation.target);
      break;
    case Operation::kFill:
      memset(reach(operation.target, operation.size, "a fill"), operation.value, operation.size);
      break;
    case Operation::kCopy:
      if (operation.watched && hash_of(operation.watched, operation.size) != operation.hash)
        violation(std::string(operation.watched == operation.source ? "the source" : "the target") + " of a copy, " +
                  std::to_string(operation.size) + " bytes of the host at " + in_hex(operation.watched) +
                  ", changed between the call and the copy");
      check_filled(operation);
      memmove(reach(operation.target, operation.size, "a copy"), reach(operation.source, operation.size, "a copy"), operation.size);
      device_wrote(operation.target, operation.size);
  }
}

void give(cudaStream_t handle, Operation operation) {
  Stream& stream = streams[handle];
  operation.number = ++operations;
  if (!lazy || !handle) {  // the default stream of this runtime works at once
    advance({handle, stream.given});
    carry_out(operation);
    stream.given++, stream.done++;
    return;
  }
  stream.waiting.push_back(operation);
  stream.given++;
  progress();
}

long given_to(cudaStream_t stream) {
  Guard held(guard);
  return streams[stream].given;
}

// A thread of the host waits. It waits for some time if one stream is late: other threads go on meanwhile.
void wait_for(const Position& position) {
  bool sleeps;
  {
    Guard held(guard);
    sleeps = late && !has_happened(position);
  }
  if (sleeps) usleep(kLate);
  Guard held(guard);
  advance(position);
}

void check_not_in_use(const void* memory, size_t size, const char* what) {
  for (auto& [handle, stream] : streams)
    for (auto& operation : stream.waiting)
      if (operation.kind == Operation::kCopy && (overlaps(memory, size, operation.target, operation.size) ||
                                                 overlaps(memory, size, operation.source, operation.size))) {
        violation(std::string(what) + " while a copy of " + std::to_string(operation.size) + " bytes there is still to come");
        return;
      }
}

bool valid_device(int device) { return device >= 0 && device < device_count(); }

cudaMemcpyKind kind_of(const void* target, const void* source) {
  bool to = is_device(target), from = is_device(source);
  return to ? (from ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice) : (from ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
}

cudaError_t copy(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream, bool waits) {
  Guard held(guard);
  if (!size) return cudaSuccess;
  cudaMemcpyKind is = kind_of(target, source);
  if (kind != cudaMemcpyDefault && kind != is) {
    violation("a copy of " + std::to_string(size) + " bytes has another kind than its memory");
    return fail(cudaErrorInvalidValue);
  }
  const char* name = is == cudaMemcpyHostToDevice ? "h2d" : is == cudaMemcpyDeviceToHost ? "d2h" : "other copies";
  const void* host = is == cudaMemcpyHostToDevice ? source : is == cudaMemcpyDeviceToHost ? target : nullptr;
  bool pageable = host && !is_locked(host, size);
  count(std::string(name) + (pageable ? " pageable" : ""));
  count(std::string(name) + " bytes", size);
  if (!stream) count("on the default stream");
  Operation operation{Operation::kCopy};
  operation.target = target, operation.source = source, operation.size = size;
  if (lazy && host && !pageable) operation.watched = host, operation.hash = hash_of(host, size);
  give(stream, operation);
  if (pageable || waits) advance({stream, streams[stream].given});  // CUDA returns after such a copy
  return cudaSuccess;
}

cudaError_t launched(cudaStream_t stream) {
  Guard held(guard);
  count("launches");
  if (!stream) count("on the default stream");
  cudaError_t error = last_error;  // a launch reports the error of the call before it
  last_error = cudaSuccess;
  return error;
}

}  // namespace

extern "C" {

// ---- what a test asks -------------------------------------------------------------------------------------------------------

void fake_count(const char* name) { count(name); }

void fake_launch(void) { count("launches"); }

// A call on the host as an operation of a stream, and the address by which it reaches device memory.
void fake_give(cudaStream_t stream, void (*call)(void*), void* argument) { cudaLaunchHostFunc(stream, call, argument); }

char* fake_reach(const void* address, size_t size) {
  Guard held(guard);
  return reach(address, size, "an operation");
}

void fake_reset(void) {
  Guard held(guard);
  counts.clear();
  violations.clear();
}

void fake_set_lazy(int on) {
  Guard held(guard);
  advance_all();
  lazy = on;
  late = nullptr;
}

void fake_set_late(cudaStream_t stream) {
  fake_set_lazy(1);
  late = stream;
}

void fake_set_limit(size_t bytes) { limit = bytes; }

void fake_fail_locks(int number) { lock_failures = number; }

// The allocation of device memory after this many more fails, and no other; -1: none does. Returns how many were still to
// come, -1 if none was.
int fake_fail_malloc(int after) {
  Guard held(guard);
  std::swap(after, malloc_to_fail);
  return after;
}

// Lines "name=number", then lines that are sentences, one for each violation. Valid until the next call.
const char* fake_report(void) {
  Guard held(guard);
  static std::string text;
  text.clear();
  for (auto& [name, number] : counts) text += name + "=" + std::to_string(number) + "\n";
  text += "locked ranges=" + std::to_string(locked_memory.size()) + "\ndevice bytes=" + std::to_string(used) + "\n";
  for (auto& sentence : violations) text += sentence + "\n";
  return text.c_str();
}

// ---- devices ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* number) { return *number = device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaInitDevice(int device, unsigned, unsigned) { return valid_device(device) ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (!valid_device(device)) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "GPU without kernels");
  properties->major = gpu().major();
  properties->minor = gpu().minor();
  properties->totalGlobalMem = kTotalMemory;
  properties->multiProcessorCount = gpu().multiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = gpu().threads;
  properties->maxBlocksPerMultiProcessor = gpu().blocks;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = gpu().shared_by_request();
  properties->sharedMemPerMultiprocessor = gpu().shared;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = gpu().l2 << 20;
  properties->memoryBusWidth = gpu().bus;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->canMapHostMemory = properties->unifiedAddressing = properties->concurrentKernels = properties->cooperativeLaunch = 1;
  properties->asyncEngineCount = 3;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[1]; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:00:%02x.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  Guard held(guard);
  count("DeviceSynchronize");
  advance_all();
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "another CUDA error";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error); }

// ---- streams and events -----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Guard held(guard);
  count("StreamCreate");
  *stream = cudaStream_t(last_stream += 16);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard held(guard);
  count("StreamQuery");
  Stream& stream = streams[handle];
  return stream.done >= stream.given ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  count("StreamSynchronize");
  wait_for({handle, given_to(handle)});
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Guard held(guard);
  count("StreamWaitEvent");
  Operation wait{Operation::kWait};
  wait.position = ((Event*)event)->position;
  if (wait.position.count > 0) give(stream, wait);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* argument) {
  Guard held(guard);
  Operation operation{Operation::kCall};
  operation.call = call, operation.target = argument;
  give(stream, operation);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  count("EventCreate");
  *event = (cudaEvent_t) new Event();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Guard held(guard);
  count("EventRecord");
  *(Event*)event = {{stream, streams[stream].given}, now()};
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard held(guard);
  count("EventQuery");
  return has_happened(((Event*)event)->position) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count("EventSynchronize");
  wait_for(((Event*)event)->position);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  Guard held(guard);
  Event *start = (Event*)first, *end = (Event*)second;
  if (!has_happened(start->position) || !has_happened(end->position)) return cudaErrorNotReady;
  *milliseconds = float((end->seconds - start->seconds) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* number) {
  if (status) *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (number) *number = 0;
  return cudaSuccess;
}

// ---- memory -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, size_t size) {
  Guard held(guard);
  count("Malloc");
  if (used + size > limit || (malloc_to_fail >= 0 && malloc_to_fail-- == 0)) return fail(cudaErrorMemoryAllocation);
  size_t whole = (size + kPage - 1) / kPage * kPage;
  int file = memfd_create("device memory", 0);
  if (file < 0 || ftruncate(file, whole)) {
    if (file >= 0) close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  void* outside = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
  void* inside = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (outside == MAP_FAILED || inside == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  device_memory[uintptr_t(outside)] = {size, (char*)inside, current_device};
  used += size;
  *address = outside;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  Guard held(guard);
  if (!address) return cudaSuccess;
  count("Free");
  auto found = device_memory.find(uintptr_t(address));
  if (found == device_memory.end()) {
    violation("cudaFree of memory that cudaMalloc has not given");
    return fail(cudaErrorInvalidValue);
  }
  advance_all();  // cudaFree waits for the device
  size_t whole = (found->second.size + kPage - 1) / kPage * kPage;
  munmap(address, whole);
  munmap(found->second.inside, whole);
  used -= found->second.size;
  device_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = kTotalMemory;
  *free_bytes = kTotalMemory - used;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  Guard held(guard);
  count("HostAlloc");
  *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  locked_memory[uintptr_t(*address)] = size;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  Guard held(guard);
  auto found = locked_memory.find(uintptr_t(address));
  if (found == locked_memory.end()) return fail(cudaErrorInvalidValue);
  check_not_in_use(address, found->second, "page-locked memory was freed");
  munmap(address, found->second);
  locked_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  Guard held(guard);
  count("HostRegister");
  count("HostRegister bytes", size);
  auto next = locked_memory.lower_bound(uintptr_t(address));
  bool reaches_next = next != locked_memory.end() && next->first < uintptr_t(address) + size;
  if (reaches_next || region_of(locked_memory, uintptr_t(address), size_of_range) != locked_memory.end()) {
    violation("memory that is page-locked already was page-locked again");
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  if (lock_failures > 0) {
    lock_failures--;
    return fail(cudaErrorMemoryAllocation);
  }
  locked_memory[uintptr_t(address)] = size;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  Guard held(guard);
  count("HostUnregister");
  auto found = locked_memory.find(uintptr_t(address));
  if (found == locked_memory.end()) {
    violation("memory that is not page-locked was unlocked");
    return fail(cudaErrorHostMemoryNotRegistered);
  }
  check_not_in_use(address, found->second, "memory was unlocked");
  unsigned char resident;
  if (mincore((void*)(uintptr_t(address) / kPage * kPage), 1, &resident)) violation("memory was unlocked after it had gone back to the system");
  locked_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Guard held(guard);
  count("PointerGetAttributes");
  memset(attributes, 0, sizeof *attributes);
  bool on_device = is_device(address);
  attributes->type = on_device ? cudaMemoryTypeDevice : is_locked(address, 1) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = on_device ? region_of(device_memory, uintptr_t(address), size_of_region)->second.device : current_device;
  attributes->devicePointer = attributes->hostPointer = (void*)address;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(target, source, size, kind, stream, false);
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  return copy(target, source, size, kind, nullptr, true);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return copy(target, source, size, cudaMemcpyDefault, stream, false);
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  Guard held(guard);
  count("fills");
  Operation operation{Operation::kFill};
  operation.target = target, operation.value = value, operation.size = size;
  give(stream, operation);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* target, int value, size_t size) { return cudaMemsetAsync(target, value, size, nullptr); }

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char variable[1 << 16];
  return *address = variable, cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// ---- kernels ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) { return launched(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) { return launched(config->stream); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) { return launched(stream); }
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) { return launched(stream); }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { return *kernel = cudaKernel_t(function), cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = atoi(gpu().capability);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int, size_t, unsigned) {
  return *number = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) { return *number = 2, cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : fail(cudaErrorInvalidValue);
}

// Calls that this runtime does not have. They are counted, so that a test can tell that none was needed.
// Their names are given to the assembler alone: the header declares them with parameters.
#define NOT_SUPPORTED(name)                   \
  cudaError_t refused_##name() __asm__(#name); \
  cudaError_t refused_##name() { return count("not supported: " #name), fail(cudaErrorNotSupported); }
NOT_SUPPORTED(cudaDeviceEnablePeerAccess)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool)
NOT_SUPPORTED(cudaDeviceGetGraphMemAttribute)
NOT_SUPPORTED(cudaFreeAsync)
NOT_SUPPORTED(cudaGraphAddNode)
NOT_SUPPORTED(cudaGraphDestroy)
NOT_SUPPORTED(cudaGraphExecDestroy)
NOT_SUPPORTED(cudaGraphInstantiateWithFlags)
NOT_SUPPORTED(cudaGraphLaunch)
NOT_SUPPORTED(cudaIpcCloseMemHandle)
NOT_SUPPORTED(cudaIpcGetEventHandle)
NOT_SUPPORTED(cudaIpcGetMemHandle)
NOT_SUPPORTED(cudaIpcOpenEventHandle)
NOT_SUPPORTED(cudaIpcOpenMemHandle)
NOT_SUPPORTED(cudaMallocAsync)
NOT_SUPPORTED(cudaMemcpy2DAsync)
NOT_SUPPORTED(cudaStreamAddCallback)
NOT_SUPPORTED(cudaStreamBeginCapture)
NOT_SUPPORTED(cudaStreamEndCapture)
#define ACCEPTED(name)                          \
  cudaError_t accepted_##name() __asm__(#name); \
  cudaError_t accepted_##name() { return cudaSuccess; }
ACCEPTED(cudaLibraryLoadData)
ACCEPTED(cudaLibraryGetKernel)
ACCEPTED(cudaLibraryUnload)
ACCEPTED(cudaKernelSetAttributeForDevice)
ACCEPTED(cudaProfilerStart)
ACCEPTED(cudaProfilerStop)

// ---- cuBLAS: products are counted -------------------------------------------------------------------------------------------

int cublasCreate_v2(void** handle) { return *handle = malloc(64), 0; }
int cublasDestroy_v2(void* handle) { return free(handle), 0; }
int cublasSetStream_v2(void*, cudaStream_t) { return 0; }
int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasSetPointerMode_v2(void*, int) { return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
int cublasGetVersion_v2(void*, int* version) { return *version = 130100, 0; }
int cublasLtCreate(void** handle) { return *handle = malloc(64), 0; }
int cublasLtDestroy(void* handle) { return free(handle), 0; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* result, int* number) {
  memset(result, 0, 64);
  return *number = 1, 0;
}

#define PRODUCT(name) \
  int name() { return count("products"), 0; }
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDotEx) PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmBatchedEx) PRODUCT(cublasSgemm_v2_64) PRODUCT(cublasDgemm_v2_64) PRODUCT(cublasGemmEx_64)
PRODUCT(cublasGemmStridedBatchedEx_64) PRODUCT(cublasSgemmStridedBatched_64) PRODUCT(cublasDgemmStridedBatched_64)
}
