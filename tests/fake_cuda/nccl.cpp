// NCCL without GPUs, between processes of one machine, for runtime.cpp. It stands in front of libnccl (LD_PRELOAD).
//
// A collective is an operation of its stream. When the stream comes to it, this rank posts what it sends as a file of /dev/shm, and the
// stream goes on when all ranks have posted theirs. Then bytes are moved and summed as NCCL does, in the order of the ranks.
//
// A violation, as of runtime.cpp, is
//   collectives of a communicator that differ between its ranks: in kind, size, dtype, operation, root or number (results are then 0xff)
//   two ranks of a communicator on one device
//   a stream or memory of another device than the communicator's
//
// fake_nccl_log has what this process has launched, in order, a line each. Communicators have the same names in all their ranks.
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <fcntl.h>
// nccl.h includes them and needs nothing of them; they include headers that the packages of PyTorch lack.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

extern "C" {
void fake_lock(void);
void fake_unlock(void);
void fake_count(const char* name);
void fake_violation(const char* sentence);
char* fake_reach(const void* address, size_t size);
int fake_device_of(const void* address);
int fake_device_of_stream(cudaStream_t stream);
long fake_give_meeting(cudaStream_t stream, bool (*meet)(void*), void* argument, bool (*wanted)(int, cudaStream_t*, long*));
void fake_wait(cudaStream_t stream, cudaStream_t other, long count);
}

namespace {

constexpr int kPatience = 120;  // seconds for the ranks of a communicator to come together

enum Kind : int { kAllGather, kAllReduce, kReduceScatter, kBroadcast, kReduce, kGather, kAllToAll, kSend, kReceive };
const char* const kNames[] = {"AllGather", "AllReduce", "ReduceScatter", "Broadcast", "Reduce", "Gather", "AlltoAll", "Send", "Recv"};
const char* const kTypes[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"};
constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct Part {  // one call: what has to be equal on all ranks, and this rank's memory
  int kind, type, op, root;  // of a message, the root is the other rank
  size_t entries;
  const void* source;
  void* target;

  size_t size() const { return entries * kSizes[type]; }
  bool is_message() const { return kind == kSend || kind == kReceive; }
  bool operator==(const Part& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root && entries == other.entries;
  }
  std::string text() const {
    std::string found = std::string(kNames[kind]) + " of " + std::to_string(entries) + " " + kTypes[type];
    if (kind == kAllReduce || kind == kReduceScatter || kind == kReduce) found += ", operation " + std::to_string(op);
    if (root >= 0) found += ", rank " + std::to_string(root);
    return found;
  }
};

struct Call;

struct Communicator {
  std::string folder;
  int rank, size, device;
  long calls = 0, splits = 0;
  std::map<int, long> sent, received;  // messages to and from other ranks
  bool aborted = false;
  cudaStream_t stream = nullptr;  // of the last call, and where it is there
  long count = 0;
  std::list<Call*> waiting;

  std::string name() const { return folder.substr(folder.rfind('.') + 1); }
  std::string file(const std::string& what) const { return folder + "/" + what; }
};

struct Call {  // what a group of calls has for one communicator: NCCL carries it out as one operation
  Communicator* communicator;
  cudaStream_t stream;
  std::vector<Part> parts;     // collectives
  std::vector<Part> messages;
  std::vector<std::string> files;  // of the messages
  long number = 0, count = 0;
  bool posted = false;

  std::string file(int rank) const { return communicator->file(std::to_string(number) + "." + std::to_string(rank)); }
};

std::list<Communicator*> communicators;
std::vector<std::string> log;
thread_local int depth = 0;
thread_local std::vector<Call*> group;

struct Guard {  // the lock of the runtime, which asks for meetings under it
  Guard() { fake_lock(); }
  ~Guard() { fake_unlock(); }
};

bool exists(const std::string& path) { return !access(path.c_str(), F_OK); }

// A file appears with all its bytes.
void write_file(const std::string& path, const std::string& bytes) {
  std::string hidden = path + "~";
  FILE* file = fopen(hidden.c_str(), "wb");
  if (!file || fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || fclose(file) || rename(hidden.c_str(), path.c_str())) {
    perror(path.c_str());
    abort();
  }
}

std::string read_file(const std::string& path) {
  std::string bytes;
  FILE* file = fopen(path.c_str(), "rb");
  if (!file) return bytes;
  struct stat state;
  fstat(fileno(file), &state);
  bytes.resize(state.st_size);
  if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) bytes.clear();
  fclose(file);
  return bytes;
}

// ---- sums -----------------------------------------------------------------------------------------------------------------------

struct Half {  // float16 or bfloat16, computed in float32
  static float widened(uint16_t bits, bool brain) {
    if (brain) {
      uint32_t whole = uint32_t(bits) << 16;
      float value;
      return memcpy(&value, &whole, 4), value;
    }
    _Float16 value;
    return memcpy(&value, &bits, 2), float(value);
  }

  static uint16_t narrowed(float value, bool brain) {
    uint16_t bits;
    if (!brain) {
      _Float16 half = _Float16(value);
      return memcpy(&bits, &half, 2), bits;
    }
    uint32_t whole;
    memcpy(&whole, &value, 4);
    if (value != value) return 0x7fff;
    return uint16_t((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
  }
};

template <typename T>
T combined(T a, T b, int op) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return a + b;
  }
}

template <typename T>
void add(char* total, const char* part, size_t entries, int op) {
  T *sums = (T*)total, *addends = (T*)part;
  for (size_t i = 0; i < entries; i++) sums[i] = combined(sums[i], addends[i], op);
}

template <typename T>
void divide(char* total, size_t entries, int by) {
  for (size_t i = 0; i < entries; i++) ((T*)total)[i] /= T(by);
}

void add_halves(char* total, const char* part, size_t entries, int op, bool brain) {
  uint16_t *sums = (uint16_t*)total, *addends = (uint16_t*)part;
  for (size_t i = 0; i < entries; i++)
    sums[i] = Half::narrowed(combined(Half::widened(sums[i], brain), Half::widened(addends[i], brain), op), brain);
}

void add(int type, char* total, const char* part, size_t entries, int op) {
  switch (type) {
    case ncclInt8: return add<int8_t>(total, part, entries, op);
    case ncclUint8: return add<uint8_t>(total, part, entries, op);
    case ncclInt32: return add<int32_t>(total, part, entries, op);
    case ncclUint32: return add<uint32_t>(total, part, entries, op);
    case ncclInt64: return add<int64_t>(total, part, entries, op);
    case ncclUint64: return add<uint64_t>(total, part, entries, op);
    case ncclFloat32: return add<float>(total, part, entries, op);
    case ncclFloat64: return add<double>(total, part, entries, op);
    default: return add_halves(total, part, entries, op, type == ncclBfloat16);
  }
}

// The sum of the parts that all ranks have sent, in rank order.
std::string summed(const Part& part, const std::vector<const char*>& sent, size_t skipped) {
  size_t entries = part.entries;
  std::string total(sent[0] + skipped * kSizes[part.type], part.size());
  for (size_t r = 1; r < sent.size(); r++) add(part.type, total.data(), sent[r] + skipped * kSizes[part.type], entries, part.op);
  if (part.op == ncclAvg && part.type == ncclFloat32) divide<float>(total.data(), entries, sent.size());
  if (part.op == ncclAvg && part.type == ncclFloat64) divide<double>(total.data(), entries, sent.size());
  return total;
}

// ---- a collective -----------------------------------------------------------------------------------------------------------------

// Bytes that a rank sends.
size_t sent_bytes(const Part& part, int rank, int size) {
  switch (part.kind) {
    case kReduceScatter: case kAllToAll: return part.size() * size;
    case kBroadcast: return rank == part.root ? part.size() : 0;
    default: return part.size();
  }
}

// Bytes that it gets.
size_t received_bytes(const Part& part, int rank, int size) {
  switch (part.kind) {
    case kAllGather: case kAllToAll: return part.size() * size;
    case kReduce: return rank == part.root ? part.size() : 0;
    case kGather: return rank == part.root ? part.size() * size : 0;
    default: return part.size();
  }
}

// The results of a rank, from what each rank has sent.
std::string result(const Part& part, const std::vector<const char*>& sent, int rank) {
  std::string found;
  switch (part.kind) {
    case kAllGather: case kGather:
      for (const char* each : sent) found.append(each, part.size());
      return found;
    case kAllToAll:
      for (const char* each : sent) found.append(each + rank * part.size(), part.size());
      return found;
    case kBroadcast: return std::string(sent[part.root], part.size());
    case kReduceScatter: return summed(part, sent, rank * part.entries);
    default: return summed(part, sent, 0);
  }
}

void put(const void* target, const std::string& bytes) {
  if (bytes.size()) memcpy(fake_reach(target, bytes.size()), bytes.data(), bytes.size());
}

std::string taken(const void* source, size_t size) { return size ? std::string(fake_reach(source, size), size) : std::string(); }

std::string posted(const Call& call) {
  std::string bytes;
  size_t number = call.parts.size();
  bytes.append((const char*)&number, sizeof number);
  for (const Part& part : call.parts) bytes.append((const char*)&part, sizeof part);
  for (const Part& part : call.parts) bytes += taken(part.source, sent_bytes(part, call.communicator->rank, call.communicator->size));
  return bytes;
}

std::vector<Part> parts_in(const std::string& bytes) {
  size_t number = *(const size_t*)bytes.data();
  std::vector<Part> parts(number);
  memcpy((void*)parts.data(), bytes.data() + sizeof number, number * sizeof(Part));
  return parts;
}

std::string text_of(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) text += (text.empty() ? "" : "; ") + part.text();
  return text;
}

void differ(const Call& call, int other, const std::vector<Part>& theirs) {
  Communicator& c = *call.communicator;
  std::string text = "collective " + std::to_string(call.number) + " of " + c.name() + ": rank " + std::to_string(c.rank) + " calls " +
                     text_of(call.parts) + ", rank " + std::to_string(other) + " calls " + text_of(theirs);
  fake_violation(text.c_str());
  fprintf(stderr, "NCCL without a GPU: %s\n", text.c_str());
  for (const Part& part : call.parts) put(part.target, std::string(received_bytes(part, c.rank, c.size), char(0xff)));
}

void exchange(const Call& call) {
  Communicator& c = *call.communicator;
  std::vector<std::string> files;
  for (int r = 0; r < c.size; r++) files.push_back(read_file(call.file(r)));
  for (int r = 0; r < c.size; r++)
    if (auto theirs = parts_in(files[r]); theirs != call.parts) return differ(call, r, theirs);
  std::vector<const char*> sent;
  for (auto& file : files) sent.push_back(file.data() + sizeof(size_t) + call.parts.size() * sizeof(Part));
  std::vector<std::string> results;
  for (const Part& part : call.parts) {
    results.push_back(received_bytes(part, c.rank, c.size) ? result(part, sent, c.rank) : std::string());
    for (int r = 0; r < c.size; r++) sent[r] += sent_bytes(part, r, c.size);
  }
  for (size_t i = 0; i < results.size(); i++) put(call.parts[i].target, results[i]);
}

bool all_posted(const Call& call) {
  for (int r = 0; r < call.communicator->size; r++)
    if (!exists(call.file(r))) return false;
  return true;
}

void post(Call& call) {
  call.posted = true;
  if (call.parts.size()) write_file(call.file(call.communicator->rank), posted(call));
  for (size_t i = 0; i < call.messages.size(); i++) {
    const Part& part = call.messages[i];
    size_t size = part.size();
    std::string head((const char*)&part, sizeof part);
    if (part.kind == kSend) write_file(call.files[i] + ".sent", head + taken(part.source, size));
    else write_file(call.files[i] + ".wanted", head);
  }
}

// A message has left when the other rank has taken it.
bool messages_are_done(Call& call) {
  for (size_t i = 0; i < call.messages.size(); i++) {
    const Part& part = call.messages[i];
    std::string sent = call.files[i] + ".sent", wanted = call.files[i] + ".wanted";
    if (call.files[i].empty()) continue;
    if (part.kind == kSend) {
      if (exists(sent)) return false;
    } else {
      if (!exists(sent)) return false;
      std::string bytes = read_file(sent);
      const Part& theirs = *(const Part*)bytes.data();
      if (theirs.entries != part.entries || theirs.type != part.type) {
        std::string text = "a message of " + call.communicator->name() + ": rank " + std::to_string(part.root) + " calls " + theirs.text() +
                           ", rank " + std::to_string(call.communicator->rank) + " calls " + part.text();
        fake_violation(text.c_str());
        put(part.target, std::string(part.size(), char(0xff)));
      } else {
        put(part.target, bytes.substr(sizeof(Part)));
      }
      unlink(wanted.c_str());
      unlink(sent.c_str());
    }
    call.files[i].clear();
  }
  return true;
}

// Whether the ranks of a call have come. The runtime asks, and holds its own lock.
bool meet(void* argument) {
  Guard held;
  Call& call = *(Call*)argument;
  Communicator& c = *call.communicator;
  if (!c.aborted) {
    if (!call.posted) post(call);
    if (!messages_are_done(call) || (call.parts.size() && !all_posted(call))) return false;
    if (call.parts.size()) {
      exchange(call);
      if (call.number) unlink(c.file(std::to_string(call.number - 1) + "." + std::to_string(c.rank)).c_str());  // all have read it
    }
  }
  c.waiting.remove(&call);
  delete &call;
  return true;
}

// Whether another rank has come to a call, and this one has not.
bool is_wanted(const Call& call) {
  if (call.posted) return false;
  Communicator& c = *call.communicator;
  if (c.aborted) return true;
  for (int r = 0; call.parts.size() && r < c.size; r++)
    if (r != c.rank && exists(call.file(r))) return true;
  for (size_t i = 0; i < call.messages.size(); i++)
    if (exists(call.files[i] + (call.messages[i].kind == kSend ? ".wanted" : ".sent"))) return true;
  return false;
}

// Of the calls that another rank has come to, and this one has not, that with this number.
bool wanted(int number, cudaStream_t* stream, long* count) {
  Guard held;
  for (Communicator* c : communicators)
    for (Call* call : c->waiting)
      if (is_wanted(*call) && !number--) return *stream = call->stream, *count = call->count, true;
  return false;
}

void check_memory(const Communicator& c, const Part& part) {
  for (auto [memory, size] : {std::pair{part.source, part.kind == kReceive ? 0 : sent_bytes(part, c.rank, c.size)},
                              std::pair{(const void*)part.target, part.kind == kSend ? 0 : received_bytes(part, c.rank, c.size)}})
    if (size && fake_device_of(memory) != c.device)
      fake_violation((part.text() + " of a communicator of device " + std::to_string(c.device) + " has memory of " +
                      (fake_device_of(memory) < 0 ? "the host" : "device " + std::to_string(fake_device_of(memory)))).c_str());
}

ncclResult_t launch(Call* call) {
  Guard held;
  Communicator& c = *call->communicator;
  for (auto* parts : {&call->parts, &call->messages})
    for (const Part& part : *parts) {
      check_memory(c, part);
      log.push_back(c.name() + " " + part.text());
      fake_count((std::string("nccl ") + kNames[part.kind]).c_str());
    }
  if (fake_device_of_stream(call->stream) != c.device) {
    fake_violation("a collective was given to a stream of another device than its communicator's");
    return ncclInvalidUsage;
  }
  if (call->parts.size()) call->number = c.calls++;
  for (const Part& part : call->messages) {
    bool sends = part.kind == kSend;
    int source = sends ? c.rank : part.root, target = sends ? part.root : c.rank;
    long number = sends ? c.sent[target]++ : c.received[source]++;
    call->files.push_back(c.file("message." + std::to_string(source) + "." + std::to_string(target) + "." + std::to_string(number)));
  }
  if (c.stream && c.stream != call->stream) fake_wait(call->stream, c.stream, c.count);  // NCCL orders the calls of a communicator
  c.waiting.push_back(call);
  c.stream = call->stream;
  call->count = LONG_MAX;
  long count = fake_give_meeting(call->stream, meet, call, wanted);
  c.count = count;
  if (std::find(c.waiting.begin(), c.waiting.end(), call) != c.waiting.end()) call->count = count;  // else it is done, and gone
  return ncclSuccess;
}

ncclResult_t end_of_group() {
  std::vector<Call*> calls;
  std::swap(calls, group);
  ncclResult_t first = ncclSuccess;
  for (Call* call : calls)
    if (ncclResult_t result = launch(call); result != ncclSuccess && first == ncclSuccess) first = result;
  return first;
}

ncclResult_t give(Communicator* communicator, cudaStream_t stream, const Part& part) {
  if (!communicator || communicator->aborted) return ncclInvalidUsage;
  auto of_communicator = [&](Call* call) { return call->communicator == communicator; };
  auto found = std::find_if(group.begin(), group.end(), of_communicator);
  if (found == group.end()) found = group.insert(group.end(), new Call{communicator, stream, {}, {}, {}});
  if ((*found)->stream != stream) fake_violation("the calls of a group have several streams");
  (part.is_message() ? (*found)->messages : (*found)->parts).push_back(part);
  return depth ? ncclSuccess : end_of_group();
}

// ---- communicators ------------------------------------------------------------------------------------------------------------------

// What each rank has written under a name, when all have.
bool met(const std::string& folder, const std::string& name, int rank, int size, const std::string& mine, std::vector<std::string>& all) {
  write_file(folder + "/" + name + "." + std::to_string(rank), mine);
  for (int r = 0; r < size; r++) {
    std::string path = folder + "/" + name + "." + std::to_string(r);
    for (int looks = 0; !exists(path); looks++, usleep(1000))
      if (looks > kPatience * 1000) {
        fake_violation(("rank " + std::to_string(r) + " of a communicator has not come").c_str());
        return false;
      }
    all.push_back(read_file(path));
  }
  return true;
}

ncclResult_t make(ncclComm_t* made, const std::string& folder, int rank, int size) {
  int device;
  cudaGetDevice(&device);
  mkdir(folder.c_str(), 0700);
  std::vector<std::string> devices;
  if (!met(folder, "device", rank, size, std::to_string(device), devices)) return ncclSystemError;
  for (int r = 0; r < size; r++)
    if (r != rank && devices[r] == devices[rank]) {
      fake_violation(("ranks " + std::to_string(std::min(r, rank)) + " and " + std::to_string(std::max(r, rank)) +
                      " of a communicator have device " + devices[rank]).c_str());
      return ncclInvalidUsage;
    }
  auto* communicator = new Communicator{folder, rank, size, device};
  Guard held;
  communicators.push_back(communicator);
  fake_count("nccl communicators");
  *made = (ncclComm_t)communicator;
  return ncclSuccess;
}

Communicator* of(ncclComm_t handle) { return (Communicator*)handle; }

void remove_folder(const std::string& folder) {
  DIR* opened = opendir(folder.c_str());
  if (!opened) return;
  while (dirent* entry = readdir(opened))
    if (entry->d_name[0] != '.') unlink((folder + "/" + entry->d_name).c_str());
  closedir(opened);
  rmdir(folder.c_str());
}

// The last rank removes the folder.
void leave(Communicator* c) {
  write_file(c->file("left." + std::to_string(c->rank)), "");
  for (int r = 0; r < c->size; r++)
    if (!exists(c->file("left." + std::to_string(r)))) return;
  remove_folder(c->folder);
}

}  // namespace

extern "C" {

// Lines "communicator call", in the order of the launches of this process. Valid until the next call.
const char* fake_nccl_log(void) {
  Guard held;
  static std::string text;
  text.clear();
  for (auto& line : log) text += line + "\n";
  return text.c_str();
}

// Collectives that are not done, a line each. Valid until the next call.
const char* fake_nccl_waiting(void) {
  Guard held;
  static std::string text;
  text.clear();
  for (Communicator* c : communicators)
    for (Call* call : c->waiting)
      for (auto* parts : {&call->parts, &call->messages})
        for (const Part& part : *parts)
          text += c->name() + " " + part.text() + ", number " + std::to_string(call->number) + " of rank " + std::to_string(c->rank) +
                  (call->posted ? ", waits for other ranks" : ", not begun") + ", stream " + std::to_string(uintptr_t(call->stream)) + "\n";
  return text.c_str();
}

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : result == ncclInvalidUsage ? "invalid usage" : "an error of NCCL without a GPU"; }
const char* ncclGetLastError(ncclComm_t) { return "see the violations of the runtime without a GPU"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  uint64_t random;
  if (getrandom(&random, sizeof random, 0) != sizeof random) return ncclSystemError;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/dev/shm/fake_nccl.%016lx", random);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return make(made, id.internal, rank, size);
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) { return make(made, id.internal, rank, size); }

ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return make(made, ids[0].internal, rank, size);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  Communicator* c = of(handle);
  std::string name = "split" + std::to_string(c->splits++);
  std::vector<std::string> all;
  if (!met(c->folder, name, c->rank, c->size, std::to_string(color) + " " + std::to_string(key), all)) return ncclSystemError;
  std::vector<std::pair<int, int>> members;  // key and rank
  for (int r = 0; r < c->size; r++) {
    int theirs, at;
    sscanf(all[r].c_str(), "%d %d", &theirs, &at);
    if (theirs == color) members.push_back({at, r});
  }
  *made = nullptr;
  if (color < 0) return ncclSuccess;
  std::sort(members.begin(), members.end());
  int rank = std::find(members.begin(), members.end(), std::pair{key, c->rank}) - members.begin();
  return make(made, c->folder + name + "c" + std::to_string(color), rank, members.size());
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Communicator* c = of(handle);
  {
    Guard held;
    communicators.remove(c);
  }
  leave(c);
  return ncclSuccess;  // a call that is still to come keeps the communicator
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Guard held;
  fake_count("nccl aborts");
  of(handle)->aborted = true;
  leave(of(handle));
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int* count) { return *count = of(c)->size, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* device) { return *device = of(c)->device, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) { return *rank = of(c)->rank, ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, size_t, void** handle) { return *handle = memory, ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** address, size_t size) { return cudaMalloc(address, size) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void* address) { return cudaFree(address) ? ncclUnhandledCudaError : ncclSuccess; }

ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : end_of_group(); }

ncclResult_t ncclAllGather(const void* source, void* target, size_t entries, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kAllGather, type, 0, -1, entries, source, target});
}

ncclResult_t ncclAllReduce(const void* source, void* target, size_t entries, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kAllReduce, type, op, -1, entries, source, target});
}

ncclResult_t ncclReduceScatter(const void* source, void* target, size_t entries, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kReduceScatter, type, op, -1, entries, source, target});
}

ncclResult_t ncclBroadcast(const void* source, void* target, size_t entries, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kBroadcast, type, 0, root, entries, source, target});
}

ncclResult_t ncclBcast(void* memory, size_t entries, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, entries, type, root, c, stream);
}

ncclResult_t ncclReduce(const void* source, void* target, size_t entries, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kReduce, type, op, root, entries, source, target});
}

ncclResult_t ncclGather(const void* source, void* target, size_t entries, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kGather, type, 0, root, entries, source, target});
}

ncclResult_t ncclAlltoAll(const void* source, void* target, size_t entries, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kAllToAll, type, 0, -1, entries, source, target});
}

ncclResult_t ncclSend(const void* source, size_t entries, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kSend, type, 0, peer, entries, source, nullptr});
}

ncclResult_t ncclRecv(void* target, size_t entries, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
  return give(of(c), stream, {kReceive, type, 0, peer, entries, nullptr, target});
}

// Calls that this NCCL does not have. The real one would take a communicator for its own.
#define NOT_SUPPORTED(name)                    \
  ncclResult_t refused_##name() __asm__(#name); \
  ncclResult_t refused_##name() { return fake_count("not supported: " #name), ncclInvalidUsage; }
NOT_SUPPORTED(ncclCommGetUniqueId) NOT_SUPPORTED(ncclCommGrow) NOT_SUPPORTED(ncclCommInitAll) NOT_SUPPORTED(ncclCommMemStats)
NOT_SUPPORTED(ncclCommResume) NOT_SUPPORTED(ncclCommRevoke) NOT_SUPPORTED(ncclCommShrink) NOT_SUPPORTED(ncclCommSuspend)
NOT_SUPPORTED(ncclCommWindowDeregister) NOT_SUPPORTED(ncclCommWindowRegister) NOT_SUPPORTED(ncclDevCommCreate)
NOT_SUPPORTED(ncclDevCommDestroy) NOT_SUPPORTED(ncclGetLsaMultimemDevicePointer) NOT_SUPPORTED(ncclGetPeerDevicePointer)
NOT_SUPPORTED(ncclGroupSimulateEnd) NOT_SUPPORTED(ncclPutSignal) NOT_SUPPORTED(ncclRedOpCreatePreMulSum) NOT_SUPPORTED(ncclRedOpDestroy)
NOT_SUPPORTED(ncclSignal) NOT_SUPPORTED(ncclWaitSignal) NOT_SUPPORTED(ncclWinGetUserPtr)
}
