// NCCL between processes of one machine: real sums and messages, in the order of each stream.
//
// A communicator is a file of shared memory, in which each rank says what it has begun; its peers read the operands from
// its memory (process_vm_readv(2)). As NCCL's kernels do, each keeps its queue busy until its peers have come. Ranks that
// disagree about a call end the process, which names both. Each kernel begins SIMULATED_NCCL_DELAY_US (0) late. With
// SIMULATED_CUDA_ALONE (0) this rank has no peers: it receives zeros, and its other calls end at once and change nothing.
#include "streams.h"

#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace simulated;

namespace {
enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST };
const char* const NAMES[] = {"all-reduce", "all-gather", "reduce-scatter", "broadcast"};

struct Call {  // a rank's newest collective; its number is written last
  std::atomic<uint64_t> number, read;
  uint64_t address, count;
  int kind, type, operation, root;
};
struct Message {  // the newest from one rank to another
  std::atomic<uint64_t> posted, done;
  uint64_t address, bytes;
};
struct Shared {
  std::atomic<int> joined;
  std::atomic<int> process[1];  // one for each rank; then the calls, then the messages
};
}  // namespace

static const bool ALONE = setting("SIMULATED_CUDA_ALONE", 0);
static std::atomic<int> communicators{0};

struct ncclComm {
  int ranks, rank, device;
  std::string name;
  Shared* shared = nullptr;
  Call* calls = nullptr;
  Message* messages = nullptr;
  uint64_t number = 0, splits = 0;
  std::vector<uint64_t> sent = std::vector<uint64_t>(ranks), received = sent;
  std::atomic<bool> alone{ALONE};  // it goes on without its peers: it has none, or it was aborted
};

namespace {
size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

void read_from(int process, uint64_t from, void* to, size_t size) {
  if (process == getpid()) { memmove(to, (void*)from, size); return; }
  for (size_t done = 0; done < size;) {
    iovec local{(char*)to + done, size - done}, remote{(void*)(from + done), size - done};
    ssize_t read = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (read <= 0) return simulated_fail("NCCL cannot read the memory of a peer, which has ended or forbids it (ptrace)");
    done += read;
  }
}

struct Bfloat16 {  // rounded to the nearest, to even among two
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

template <class T>
T combined(T a, T b, int operation) {
  switch (operation) {
    case ncclProd: return a * b;
    case ncclMax: return a > b ? a : b;
    case ncclMin: return a < b ? a : b;
    default: return a + b;
  }
}

// Combine what the ranks have, in their order, as numbers of type `Sum`, and round once.
template <class T, class Sum = T>
void reduce(const std::vector<std::vector<char>>& parts, void* result, size_t count, int operation) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = ((const T*)parts[0].data())[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) sum = combined<Sum>(sum, ((const T*)parts[rank].data())[i], operation);
    ((T*)result)[i] = T(operation == ncclAvg ? Sum(sum / Sum(parts.size())) : sum);
  }
}

void reduce(const std::vector<std::vector<char>>& parts, void* result, size_t count, int type, int operation) {
  switch (type) {
    case ncclInt8: return reduce<int8_t>(parts, result, count, operation);
    case ncclUint8: return reduce<uint8_t>(parts, result, count, operation);
    case ncclInt32: return reduce<int32_t>(parts, result, count, operation);
    case ncclUint32: return reduce<uint32_t>(parts, result, count, operation);
    case ncclInt64: return reduce<int64_t>(parts, result, count, operation);
    case ncclUint64: return reduce<uint64_t>(parts, result, count, operation);
    case ncclFloat16: return reduce<_Float16, float>(parts, result, count, operation);
    case ncclBfloat16: return reduce<Bfloat16, float>(parts, result, count, operation);
    case ncclFloat32: return reduce<float>(parts, result, count, operation);
    case ncclFloat64: return reduce<double>(parts, result, count, operation);
    default: return simulated_fail("NCCL has no sums of this type");
  }
}

using Step = std::function<bool()>;  // goes on with a call as far as its peers have come; whether it is done
thread_local int depth = 0;
thread_local std::vector<std::pair<cudaStream_t, Step>> group;

// Queue the calls of a group: those of one stream are one kernel, which goes on with each in turn.
void launch_group() {
  std::map<cudaStream_t, std::vector<Step>> by_stream;
  for (auto& [stream, step] : group) by_stream[stream].push_back(std::move(step));
  group.clear();
  for (auto& [stream, steps] : by_stream)
    enqueue(stream, [steps = std::move(steps), late = setting("SIMULATED_NCCL_DELAY_US", 0)]() mutable {
      usleep(late);
      for (int looks = 0; !steps.empty(); pause(looks)) std::erase_if(steps, [](Step& step) { return step(); });
    });
}

ncclResult_t call(ncclComm* comm, cudaStream_t stream, Step step) {
  int device = device_in_use("NCCL");
  if (device != comm->device) say("NCCL is called on device %d, and its communicator is of device %d", device, comm->device);
  group.emplace_back(stream, std::move(step));
  if (!depth) launch_group();
  return ncclSuccess;
}

ncclResult_t collective(
    Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, int operation, int root, ncclComm* comm, cudaStream_t stream) {
  if (operation > ncclAvg) return ncclInvalidArgument;
  uint64_t number = ++comm->number;
  auto result = std::make_shared<std::vector<char>>();
  auto stage = std::make_shared<int>(0);
  return call(comm, stream, [=] {
    if (comm->alone) return true;
    Call& own = comm->calls[comm->rank];
    size_t size = count * width(type);
    if (*stage == 0) {
      own.address = (uint64_t)from, own.count = count, own.kind = kind, own.type = type, own.operation = operation, own.root = root;
      own.number = number;
      *stage = 1;
    }
    if (*stage == 1) {
      for (int rank = 0; rank < comm->ranks; ++rank)
        if (comm->calls[rank].number < number) return false;
      std::vector<std::vector<char>> parts;
      for (int rank = 0; rank < comm->ranks; ++rank) {
        Call& peer = comm->calls[rank];
        if (peer.kind != kind || peer.count != count || peer.type != type || peer.operation != operation || peer.root != root) {
          say("call %lu of communicator %s: rank %d is at a %s of %zu elements of type %d, rank %d at a %s of %zu of type %d",
              number, comm->name.c_str(), comm->rank, NAMES[kind], count, type, rank, NAMES[peer.kind], (size_t)peer.count, peer.type);
          abort();
        }
        if (kind == BROADCAST && rank != root) continue;
        parts.emplace_back(size);
        read_from(comm->shared->process[rank], peer.address + (kind == REDUCE_SCATTER ? comm->rank * size : 0), parts.back().data(), size);
      }
      result->resize(size * (kind == ALL_GATHER ? comm->ranks : 1));
      if (kind == ALL_REDUCE || kind == REDUCE_SCATTER)
        reduce(parts, result->data(), count, type, operation);
      else
        for (size_t part = 0; part < parts.size(); ++part) memcpy(result->data() + part * size, parts[part].data(), size);
      own.read = number;
      *stage = 2;
    }
    for (int rank = 0; rank < comm->ranks; ++rank)
      if (comm->calls[rank].read < number) return false;
    memcpy(to, result->data(), result->size());
    return true;
  });
}

// Meet the other ranks of the communicator called `name`; as in NCCL, this returns once all have come. NCCL would wait for
// ever; this gives up after SIMULATED_CUDA_JOIN_S (600) seconds.
ncclResult_t join(ncclComm_t* made, int ranks, const std::string& name, int rank) {
  int device = device_in_use("ncclCommInitRank");
  if (device < 0) return ncclUnhandledCudaError;
  ++communicators;
  auto* comm = *made = new ncclComm{ranks, rank, device, name};
  if (ALONE) return ncclSuccess;
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // where the kernel lets parents only read a process
  size_t head = (sizeof(Shared) + ranks * sizeof(int) + 63) / 64 * 64;
  size_t size = head + ranks * sizeof(Call) + (size_t)ranks * ranks * sizeof(Message);
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, size)) return ncclSystemError;
  auto* shared = (Shared*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  comm->shared = shared;
  comm->calls = (Call*)((char*)shared + head);
  comm->messages = (Message*)(comm->calls + ranks);
  shared->process[rank] = getpid();
  ++shared->joined;
  time_t end = time(nullptr) + setting("SIMULATED_CUDA_JOIN_S", 600);
  for (int looks = 0; shared->joined < ranks; pause(looks))
    if (time(nullptr) > end) {
      say("rank %d of %d waits for the others at the first use of communicator %s", rank, ranks, name.c_str());
      return ncclSystemError;
    }
  if (rank == 0) shm_unlink(name.c_str());
  return ncclSuccess;
}
}  // namespace

extern "C" {
int simulated_communicators() { return communicators; }
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t code) { return code == ncclSuccess ? "no error" : "an error of the simulated NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  FILE* random = fopen("/dev/urandom", "r");
  bool complete = random && fread(id, sizeof *id, 1, random) == 1;
  if (random) fclose(random);
  return complete ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  char name[64] = "/simulated-nccl-";
  for (int i = 0; i < 12; ++i) sprintf(name + strlen(name), "%02x", (unsigned char)id.internal[i]);
  return join(made, ranks, name, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(made, ranks, *ids, rank, config);
}
// Each rank tells the others its colour and key in its call, as an operand of an all-gather would be.
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  static thread_local int own[2];
  own[0] = color, own[1] = key;
  std::vector<int> all(2 * parent->ranks);
  if (auto code = collective(ALL_GATHER, own, all.data(), 2, ncclInt32, ncclSum, 0, parent, nullptr)) return code;
  cudaStreamSynchronize(nullptr);
  ++parent->splits;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int ranks = 0, rank = 0;
  for (int peer = 0; peer < parent->ranks; ++peer) {
    if (all[2 * peer] != color) continue;
    ++ranks;
    rank += std::make_pair(all[2 * peer + 1], peer) < std::make_pair(key, parent->rank);
  }
  return join(made, ranks, parent->name + "-" + std::to_string(parent->splits) + "-" + std::to_string(color), rank);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* code) { *code = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { comm->alone = true; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) { *ranks = comm->ranks; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { *device = comm->device; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclGroupStart() { ++depth; return ncclSuccess; }
ncclResult_t ncclGroupEnd() { if (--depth == 0) launch_group(); return ncclSuccess; }
// As NCCL's for large messages: a send ends once its receiver has read it.
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  uint64_t number = ++comm->sent[peer];
  Message& message = comm->messages[comm->rank * comm->ranks + peer];
  auto posted = std::make_shared<bool>(false);
  return call(comm, stream, [=, &message] {
    if (comm->alone) return true;
    if (!*posted) {
      if (message.done != number - 1) return false;
      message.address = (uint64_t)from;
      message.bytes = count * width(type);
      message.posted = number;
      *posted = true;
    }
    return message.done >= number;
  });
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  uint64_t number = ++comm->received[peer];
  Message& message = comm->messages[peer * comm->ranks + comm->rank];
  return call(comm, stream, [=, &message] {
    if (ALONE) memset(to, 0, count * width(type));
    if (comm->alone) return true;
    if (message.posted < number) return false;
    if (message.bytes != count * width(type)) {
      say("message %lu from rank %d to rank %d of communicator %s has %lu bytes, and its receiver expects %zu", number, peer, comm->rank,
          comm->name.c_str(), message.bytes, count * width(type));
      abort();
    }
    read_from(comm->shared->process[peer], message.address, to, message.bytes);
    message.done = number;
    return true;
  });
}
ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return collective(ALL_REDUCE, from, to, count, type, operation, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return collective(ALL_GATHER, from, to, count, type, ncclSum, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return collective(REDUCE_SCATTER, from, to, count, type, operation, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(BROADCAST, from, to, count, type, ncclSum, root, comm, stream);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
}
