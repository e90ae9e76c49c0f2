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
// Violations are noted, with a sentence each, and do not end the process (fake_report).
//
// There may be several devices (FAKE_CUDA_DEVICES). Each has its own streams and memory; a call with a stream or an event of another
// device than the current one fails where CUDA's fails. A process has a context of each device that it has used (fake_contexts).
//
// An operation may have to wait for other processes (fake_give_meeting, nccl.cpp). It is asked again and again, and the operations behind
// it stay in their stream. A thread of this runtime carries it out when another process wants it, though nothing here waits for it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gpu.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGiB = size_t(1) << 30;
constexpr int kMostViolations = 100;
constexpr int kLate = 20000;  // microseconds
constexpr int kPause = 50;    // microseconds between two looks at an operation that waits for another process
constexpr int kAsks = 20;     // a thread that asks for one event so many times, and calls nothing else meanwhile, waits for it

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
  int device = 0;
};

struct Operation {
  enum Kind { kCopy, kFill, kWait, kCall, kMeeting } kind;
  void* target = nullptr;
  const void* source = nullptr;
  size_t size = 0;
  int value = 0;               // of a fill
  Position position;           // of a wait
  cudaHostFn_t call = nullptr; // of a call on the host
  bool (*meet)(void*) = nullptr;  // of a meeting with other processes: whether they have come
  const void* watched = nullptr;  // memory of the host that must not change before a copy, and its hash at the call
  uint64_t hash = 0;
  long number = 0;             // counts all operations, in the order of their calls
};

struct Stream {
  std::deque<Operation> waiting;
  long given = 0, done = 0;
  bool busy = false;  // with an operation, such as a wait for another stream
  int device = 0;
  bool is_default = false;
};

std::recursive_mutex guard;
std::map<std::string, long> counts;
std::vector<std::string> violations;
std::map<uintptr_t, Region> device_memory;
std::map<uintptr_t, size_t> locked_memory;
std::map<cudaStream_t, Stream> streams;
uintptr_t last_stream = 0x1000;
long operations = 0;
std::map<int, size_t> used;  // bytes of each device
size_t limit = SIZE_MAX;     // of each device; other processes have the rest of its memory
std::set<int> contexts;      // devices that this process has used
bool has_meetings = false, is_ending = false;
bool (*wanted_elsewhere)(int, cudaStream_t*, long*) = nullptr;  // the position of a meeting, by number, that other processes wait for
bool lazy = false;
cudaStream_t late = nullptr;  // the only stream that is late in the mode `lazy`; nullptr: all are
int lock_failures = 0;  // page-locks that are still to fail
int malloc_to_fail = -1;  // allocations of device memory before the one that fails; -1: none does
int launch_to_fail = -1;  // launches before the one that breaks its context; -1: none does
cudaError_t broken = cudaSuccess;  // the error of a kernel: each call returns it until the process ends
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaEvent_t asked_for = nullptr;  // by the last calls of this thread
thread_local int asks = 0;

using Guard = std::lock_guard<std::recursive_mutex>;

int device_count() {
  const char* given = getenv("FAKE_CUDA_DEVICES");
  return given ? atoi(given) : 1;
}

size_t total_memory() {  // of each device
  const char* given = getenv("FAKE_CUDA_GIB");
  return (given ? atoi(given) : 8) * kGiB;
}

size_t free_memory(int device) {
  size_t most = std::min(limit, total_memory());
  return most > used[device] ? most - used[device] : 0;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void count(const std::string& name, long by = 1) {
  Guard held(guard);
  counts[name] += by;
}

void violation(const std::string& sentence) {
  count("violations");
  if (violations.size() < kMostViolations) violations.push_back(sentence);
}

// A call that needs the context of the current device. Returns whether this process may use it: FAKE_CUDA_STRICT names its only device.
bool use_device() {
  Guard held(guard);
  asked_for = nullptr;
  const char* only = getenv("FAKE_CUDA_STRICT");
  if (only && *only && atoi(only) != current_device) {
    violation("device " + std::to_string(current_device) + " was used by a process of device " + only);
    return false;
  }
  contexts.insert(current_device);
  return true;
}

// How a call begins that fails once a kernel has failed.
#define IN_CONTEXT()                                             \
  do {                                                           \
    if (!use_device()) return fail(cudaErrorDevicesUnavailable); \
    if (broken != cudaSuccess) return fail(broken);              \
  } while (0)

// How a call ends that has waited: a kernel may have failed meanwhile.
cudaError_t waited() { return broken != cudaSuccess ? fail(broken) : cudaSuccess; }

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

bool carry_out(const Operation& operation);

bool has_happened(const Position& position) { return position.count < 0 || streams[position.stream].done >= position.count; }

// Returns whether it could be carried out. If not, it waits for another process.
bool carry_out_next(Stream& stream) {
  Operation next = stream.waiting.front();
  stream.busy = true;
  bool is_done = carry_out(next);
  stream.busy = false;
  if (!is_done) return false;
  stream.waiting.pop_front();
  stream.done++;
  return true;
}

bool is_late(cudaStream_t handle, const Stream& stream) { return lazy && !stream.is_default && (!late || handle == late); }

// Streams that are not late do all that waits for nothing.
void progress() {
  if (!late && !has_meetings) return;
  for (bool more = true; more;) {
    more = false;
    for (auto& [handle, stream] : streams)
      while (!is_late(handle, stream) && !stream.busy && !stream.waiting.empty()) {
        const Operation& next = stream.waiting.front();
        if (next.kind == Operation::kWait && !has_happened(next.position)) break;
        if (!carry_out_next(stream)) break;
        more = true;
      }
  }
}

// Carry out what a stream was given up to a position, and what that waits for, as far as other processes allow. Streams that are not late
// are as far ahead as they can be behind each operation. Returns whether the position is reached.
bool advance(const Position& position) {
  Stream& stream = streams[position.stream];
  while (stream.done < position.count && !stream.busy && !stream.waiting.empty()) {
    if (!carry_out_next(stream)) break;
    progress();
  }
  return has_happened(position);
}

// A thread of the host waits, as long as other processes keep it waiting.
void await(const Position& position) {
  for (;; usleep(kPause)) {
    Guard held(guard);
    if (advance(position)) return;
  }
}

void await_all(int device) {
  std::vector<Position> ends;
  {
    Guard held(guard);
    for (auto& [handle, stream] : streams)
      if (stream.device == device) ends.push_back({handle, stream.given});
  }
  for (const Position& end : ends) await(end);
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

bool carry_out(const Operation& operation) {
  switch (operation.kind) {
    case Operation::kWait:
      return advance(operation.position);
    case Operation::kMeeting:
      return operation.meet(operation.target);
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
  return true;
}

// The key of a stream: CUDA's handles of the default stream stand for that of the current device.
cudaStream_t key_of(cudaStream_t handle) {
  if (uintptr_t(handle) > 2) return handle;
  cudaStream_t key = cudaStream_t(0x100 + 16 * uintptr_t(current_device));
  Stream& stream = streams[key];
  stream.device = current_device, stream.is_default = true;
  return key;
}

void give(cudaStream_t handle, Operation operation) {
  Stream& stream = streams[handle];
  operation.number = ++operations;
  stream.waiting.push_back(operation);
  stream.given++;
  if (!lazy || stream.is_default) advance({handle, stream.given});
  progress();
}

long given_to(cudaStream_t key) {
  Guard held(guard);
  return streams[key].given;
}

// A thread of the host waits. It waits for some time if one stream is late: other threads go on meanwhile.
void wait_for(const Position& position) {
  bool sleeps;
  {
    Guard held(guard);
    sleeps = late && !has_happened(position);
  }
  if (sleeps) usleep(kLate);
  await(position);
}

// The process ends, and with it the memory of this runtime.
void end_meetings() {
  Guard held(guard);
  is_ending = true;
}

// Carries out the meetings that other processes wait for, and what such a meeting held up in streams that are not late.
void meet_others() {
  for (;; usleep(4 * kPause)) {
    Guard held(guard);
    if (is_ending) return;
    cudaStream_t stream;
    long count;
    // One that cannot be reached yet, since its stream waits for another process, keeps no other back.
    for (int number = 0; wanted_elsewhere && wanted_elsewhere(number, &stream, &count); number++) advance({stream, count});
    progress();
  }
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

int device_of(const void* address) {
  auto found = region_of(device_memory, uintptr_t(address), size_of_region);
  return found == device_memory.end() ? -1 : found->second.device;
}

cudaError_t copy(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t handle, bool waits) {
  if (!size) return cudaSuccess;
  IN_CONTEXT();
  Position end;
  {
    Guard held(guard);
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
    cudaStream_t key = key_of(handle);
    if (streams[key].is_default) count("on the default stream");
    for (const void* end : {(const void*)target, source})
      if (is_device(end) && device_of(end) != streams[key].device) count("copies by another device's stream");
    Operation operation{Operation::kCopy};
    operation.target = target, operation.source = source, operation.size = size;
    if ((lazy || has_meetings) && host && !pageable) operation.watched = host, operation.hash = hash_of(host, size);
    give(key, operation);
    end = {key, streams[key].given};
    waits |= pageable;  // CUDA returns after such a copy
  }
  if (waits) await(end);
  return waits ? waited() : cudaSuccess;
}

// A launch reports the error of the call before it. A stream belongs to the device that was current when it was made.
cudaError_t launched(cudaStream_t handle) {
  IN_CONTEXT();
  Guard held(guard);
  count("launches");
  cudaStream_t key = key_of(handle);
  if (streams[key].is_default) count("on the default stream");
  if (streams[key].device != current_device) {
    violation("a kernel was launched on a stream of device " + std::to_string(streams[key].device) + " while device " +
              std::to_string(current_device) + " was the current one");
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (launch_to_fail >= 0 && launch_to_fail-- == 0) broken = cudaErrorIllegalAddress;  // the calls behind it tell
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

}  // namespace

extern "C" {

// ---- what a test asks -------------------------------------------------------------------------------------------------------

void fake_count(const char* name) { count(name); }

// A launch by the driver, or a call on the host that computes the numbers of one. They return the error of CUDA.
int fake_launch(cudaStream_t stream) { return launched(stream); }

int fake_give(cudaStream_t stream, void (*call)(void*), void* argument) {
  cudaError_t error = launched(stream);
  return error != cudaSuccess ? error : cudaLaunchHostFunc(stream, call, argument);
}

// The address by which an operation reaches device memory, and the device whose memory it is; -1: memory of the host.
char* fake_reach(const void* address, size_t size) {
  Guard held(guard);
  return reach(address, size, "an operation");
}

int fake_device_of(const void* address) {
  Guard held(guard);
  return device_of(address);
}

int fake_device_of_stream(cudaStream_t stream) {
  Guard held(guard);
  return streams[key_of(stream)].device;
}

// The lock of this runtime, for calls that belong together.
void fake_lock(void) { guard.lock(); }
void fake_unlock(void) { guard.unlock(); }

void fake_violation(const char* sentence) {
  Guard held(guard);
  violation(sentence);
}

// An operation that waits for other processes: `meet` is called until it returns true. Returns how many operations the stream was given,
// with this one. `wanted` finds the stream and this number of each operation for which another process waits already.
long fake_give_meeting(cudaStream_t stream, bool (*meet)(void*), void* argument, bool (*wanted)(int, cudaStream_t*, long*)) {
  Guard held(guard);
  if (!has_meetings) atexit(end_meetings), std::thread(meet_others).detach();
  has_meetings = true, wanted_elsewhere = wanted;
  Operation operation{Operation::kMeeting};
  operation.meet = meet, operation.target = argument;
  cudaStream_t key = key_of(stream);
  give(key, operation);
  return streams[key].given;
}

// What a stream gets next waits for the first `count` operations of another one.
void fake_wait(cudaStream_t stream, cudaStream_t other, long count) {
  Guard held(guard);
  Operation wait{Operation::kWait};
  wait.position = {key_of(other), count};
  give(key_of(stream), wait);
}

// The devices that this process has used, a bit each.
unsigned fake_contexts(void) {
  Guard held(guard);
  unsigned bits = 0;
  for (int device : contexts) bits |= 1u << device;
  return bits;
}

// The launch after this many more fails as a kernel does: no call of this process works from then on; -1: none does. Returns how many
// were still to come.
int fake_fail_launch(int after) {
  Guard held(guard);
  std::swap(after, launch_to_fail);
  return after;
}

// A kernel has met an assertion: no call of this process works from now on.
void fake_assertion(void) {
  Guard held(guard);
  if (broken == cudaSuccess) broken = cudaErrorAssert;
}

void fake_reset(void) {
  Guard held(guard);
  counts.clear();
  violations.clear();
}

void fake_set_lazy(int on) {
  for (int device = 0; device < device_count(); device++) await_all(device);
  Guard held(guard);
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

size_t all_used() {
  size_t sum = 0;
  for (auto& [device, bytes] : used) sum += bytes;
  return sum;
}

// Streams that have something left to do, a line each. Valid until the next call.
const char* fake_streams(void) {
  Guard held(guard);
  static std::string text;
  text.clear();
  const char* const names[] = {"a copy", "a fill", "a wait", "a call", "a meeting"};
  for (auto& [handle, stream] : streams)
    if (!stream.waiting.empty()) {
      const Operation& next = stream.waiting.front();
      text += "stream " + std::to_string(uintptr_t(handle)) + ", " + std::to_string(stream.done) + " of " + std::to_string(stream.given) + " done, next " +
              names[next.kind];
      if (next.kind == Operation::kWait) text += " for " + std::to_string(next.position.count) + " of stream " + std::to_string(uintptr_t(next.position.stream));
      text += "\n";
    }
  return text.c_str();
}

// Lines "name=number", then lines that are sentences, one for each violation. Valid until the next call.
const char* fake_report(void) {
  Guard held(guard);
  static std::string text;
  text.clear();
  for (auto& [name, number] : counts) text += name + "=" + std::to_string(number) + "\n";
  text += "locked ranges=" + std::to_string(locked_memory.size()) + "\ndevice bytes=" + std::to_string(all_used()) + "\n";
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
  IN_CONTEXT();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "GPU without kernels");
  properties->major = gpu().major();
  properties->minor = gpu().minor();
  properties->totalGlobalMem = total_memory();
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
  IN_CONTEXT();
  count("DeviceSynchronize");
  await_all(current_device);
  return waited();
}

cudaError_t cudaGetLastError(void) {
  if (broken != cudaSuccess) return broken;
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return broken != cudaSuccess ? broken : last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorDevicesUnavailable: return "cudaErrorDevicesUnavailable";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "another CUDA error";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorAssert: return "device-side assert triggered";
    default: return cudaGetErrorName(error);
  }
}

// ---- streams and events -----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  IN_CONTEXT();
  Guard held(guard);
  count("StreamCreate");
  *stream = cudaStream_t(last_stream += 16);
  streams[*stream].device = current_device;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  Guard held(guard);
  return *device = streams[key_of(handle)].device, cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  IN_CONTEXT();
  Guard held(guard);
  count("StreamQuery");
  Stream& stream = streams[key_of(handle)];
  return stream.done >= stream.given ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  IN_CONTEXT();
  count("StreamSynchronize");
  cudaStream_t key = key_of(handle);
  wait_for({key, given_to(key)});
  return waited();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  IN_CONTEXT();
  Guard held(guard);
  count("StreamWaitEvent");
  Operation wait{Operation::kWait};
  wait.position = ((Event*)event)->position;
  if (wait.position.count > 0) give(key_of(stream), wait);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* argument) {
  IN_CONTEXT();
  Guard held(guard);
  Operation operation{Operation::kCall};
  operation.call = call, operation.target = argument;
  give(key_of(stream), operation);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  IN_CONTEXT();
  count("EventCreate");
  *event = (cudaEvent_t) new Event{{}, 0, current_device};
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return broken;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  IN_CONTEXT();
  Guard held(guard);
  count("EventRecord");
  Event& event = *(Event*)handle;
  cudaStream_t key = key_of(stream);
  if (event.device != streams[key].device) {
    violation("an event of device " + std::to_string(event.device) + " was recorded in a stream of device " + std::to_string(streams[key].device));
    return fail(cudaErrorInvalidResourceHandle);
  }
  event.position = {key, streams[key].given}, event.seconds = now();
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }

// A thread that asks again and again waits: what is late happens then.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (broken != cudaSuccess) return fail(broken);
  Guard held(guard);
  count("EventQuery");
  asks = asked_for == event ? asks + 1 : 0;
  asked_for = event;
  const Position& position = ((Event*)event)->position;
  return has_happened(position) || (asks >= kAsks && advance(position)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  IN_CONTEXT();
  count("EventSynchronize");
  wait_for(((Event*)event)->position);
  return waited();
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  IN_CONTEXT();
  Guard held(guard);
  Event *start = (Event*)first, *end = (Event*)second;
  if (start->device != end->device) return fail(cudaErrorInvalidResourceHandle);
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
  IN_CONTEXT();
  Guard held(guard);
  count("Malloc");
  if (size > free_memory(current_device) || (malloc_to_fail >= 0 && malloc_to_fail-- == 0)) return fail(cudaErrorMemoryAllocation);
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
  used[current_device] += size;
  *address = outside;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  IN_CONTEXT();
  count("Free");
  int device = fake_device_of(address);
  if (device >= 0) await_all(device);  // cudaFree waits for the device
  Guard held(guard);
  auto found = device_memory.find(uintptr_t(address));
  if (found == device_memory.end()) {
    violation("cudaFree of memory that cudaMalloc has not given");
    return fail(cudaErrorInvalidValue);
  }
  size_t whole = (found->second.size + kPage - 1) / kPage * kPage;
  munmap(address, whole);
  munmap(found->second.inside, whole);
  used[found->second.device] -= found->second.size;
  device_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  IN_CONTEXT();
  Guard held(guard);
  *total = total_memory();
  *free_bytes = free_memory(current_device);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  IN_CONTEXT();
  Guard held(guard);
  count("HostAlloc");
  *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  locked_memory[uintptr_t(*address)] = size;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  IN_CONTEXT();
  Guard held(guard);
  auto found = locked_memory.find(uintptr_t(address));
  if (found == locked_memory.end()) return fail(cudaErrorInvalidValue);
  check_not_in_use(address, found->second, "page-locked memory was freed");
  munmap(address, found->second);
  locked_memory.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  IN_CONTEXT();
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
  IN_CONTEXT();
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
  if (broken != cudaSuccess) return fail(broken);
  Guard held(guard);
  count("PointerGetAttributes");
  memset(attributes, 0, sizeof *attributes);
  bool on_device = is_device(address);
  attributes->type = on_device ? cudaMemoryTypeDevice : is_locked(address, 1) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = on_device ? device_of(address) : current_device;
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
  IN_CONTEXT();
  Guard held(guard);
  count("fills");
  Operation operation{Operation::kFill};
  operation.target = target, operation.value = value, operation.size = size;
  give(key_of(stream), operation);
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
  int name() { return count("products"), broken == cudaSuccess ? 0 : 13; /* CUBLAS_STATUS_EXECUTION_FAILED */ }
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDotEx) PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmBatchedEx) PRODUCT(cublasSgemm_v2_64) PRODUCT(cublasDgemm_v2_64) PRODUCT(cublasGemmEx_64)
PRODUCT(cublasGemmStridedBatchedEx_64) PRODUCT(cublasSgemmStridedBatched_64) PRODUCT(cublasDgemmStridedBatched_64)
}
