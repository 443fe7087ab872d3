// NCCL between processes of one machine: real sums and messages, in the order of each stream.
//
// A communicator is a file of shared memory, in which each rank tells the others what it has begun; they read operands
// from its memory (process_vm_readv(2)). As NCCL's kernels do, each keeps its queue busy until its peers have come.
// Ranks that disagree about a call end the process, which names both. Each kernel begins SIMULATED_NCCL_DELAY_US (0)
// late. With SIMULATED_CUDA_ALONE (0) this rank has no peers: it receives zeros, and its other calls change nothing.
#include <c10/core/ScalarType.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "streams.h"

using namespace simulated;
namespace {
const bool ALONE = setting("SIMULATED_CUDA_ALONE", 0);
std::atomic<int> communicators{0};
enum Kind { MESSAGE, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER };
const char* const NAMES[] = {"message", "all-reduce", "all-gather", "reduce-scatter"};

struct Terms {  // what two ranks must agree about
  int kind, type, operation;
  uint64_t count;
  bool operator==(const Terms&) const = default;
};

struct Post {  // the newest that a rank offers another one; `posted` is written last
  std::atomic<uint64_t> posted, done;
  uint64_t address;
  Terms terms;
};

struct Shared {
  std::atomic<int> joined, process[4096];  // ranks, and the process of each
  Post posts[];                            // by whether it is a message, rank and peer
};
}  // namespace

struct ncclComm {
  int ranks, rank, device;
  std::string name;
  Shared* shared = nullptr;
  std::map<std::pair<bool, int>, uint64_t> offered, taken;  // calls by whether they are messages, and peer
  std::atomic<bool> alone{ALONE};  // it goes on without its peers: it has none, or it was aborted
  Post& post(const Terms& terms, int from, int to) const {
    return shared->posts[((terms.kind == MESSAGE) * ranks + from) * ranks + to];
  }
};

namespace {
using Parts = std::vector<std::vector<char>>;  // of the ranks, in their order
using Step = std::function<bool()>;            // goes on with a call as far as its peers have come; whether it is done

// Pause between two looks at what other ranks have done; `looks` counts them.
void pause(int& looks) { usleep(++looks < 50 ? 20 : looks < 500 ? 100 : 1000); }

// Combine `parts` as numbers of type `Sum`, and round once.
template <class T, class Sum = T>
void reduce(const Parts& parts, void* result, size_t count, int operation) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = ((const T*)parts[0].data())[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      Sum next = ((const T*)parts[rank].data())[i];
      switch (operation) {
        case ncclProd: sum = sum * next; break;
        case ncclMax: sum = sum > next ? sum : next; break;
        case ncclMin: sum = sum < next ? sum : next; break;
        default: sum = sum + next;
      }
    }
    ((T*)result)[i] = T(operation == ncclAvg ? Sum(sum / Sum(parts.size())) : sum);
  }
}

struct Type { size_t width; void (*reduce)(const Parts& parts, void* result, size_t count, int operation); };
const Type TYPES[] = {  // in the order of ncclDataType_t
    {1, reduce<int8_t>}, {1, reduce<uint8_t>}, {4, reduce<int32_t>}, {4, reduce<uint32_t>}, {8, reduce<int64_t>},
    {8, reduce<uint64_t>}, {2, reduce<c10::Half, float>}, {4, reduce<float>}, {8, reduce<double>},
    {2, reduce<c10::BFloat16, float>}, {1, reduce<c10::Float8_e4m3fn, float>}, {1, reduce<c10::Float8_e5m2, float>}};
void read_from(int process, uint64_t from, void* to, size_t size) {
  for (size_t done = 0; done < size;) {
    iovec local{(char*)to + done, size - done}, remote{(void*)(from + done), size - done};
    ssize_t read = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (read <= 0) return fail("NCCL cannot read the memory of a peer, which has ended or forbids it (ptrace)");
    done += read;
  }
}

// Offer rank `peer` what is at `from`; done once that has taken it.
Step offer(ncclComm* comm, int peer, const void* from, const Terms& terms) {
  uint64_t number = ++comm->offered[{terms.kind == MESSAGE, peer}];
  return [=] {
    if (comm->alone) return true;
    Post& post = comm->post(terms, comm->rank, peer);
    if (post.posted < number && post.done == number - 1) {
      post.address = (uint64_t)from;
      post.terms = terms;
      post.posted = number;
    }
    return post.done >= number;
  };
}

// Take what rank `peer` offers: `read` gets that process and the address there.
Step take(ncclComm* comm, int peer, const Terms& terms, std::function<void(int, uint64_t)> read) {
  uint64_t number = ++comm->taken[{terms.kind == MESSAGE, peer}];
  return [=] {
    if (comm->alone) return true;
    Post& post = comm->post(terms, peer, comm->rank);
    if (post.posted < number) return false;
    if (post.terms != terms) {
      say("call %lu of communicator %s: rank %d is at a %s of %lu elements (type %d), rank %d at a %s of %lu (type %d)",
          number, comm->name.c_str(), comm->rank, NAMES[terms.kind], terms.count, terms.type, peer,
          NAMES[post.terms.kind], post.terms.count, post.terms.type);
      abort();
    }
    read(comm->shared->process[peer], post.address);
    post.done = number;
    return true;
  };
}
thread_local int depth = 0;
thread_local std::vector<std::pair<cudaStream_t, Step>> group;
// Queue the calls of a group: those of one stream are one kernel, which goes on with each in turn.
ncclResult_t launch_group() {
  std::map<cudaStream_t, std::vector<Step>> by_stream;
  for (auto& [stream, step] : std::exchange(group, {})) by_stream[stream].push_back(step);
  for (auto& [stream, steps] : by_stream) {
    auto code = enqueue(stream, [steps, late = setting("SIMULATED_NCCL_DELAY_US", 0)]() mutable {
      usleep(late);
      for (int looks = 0; !steps.empty(); pause(looks)) std::erase_if(steps, [](Step& step) { return step(); });
    });
    if (code != cudaSuccess) return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}
ncclResult_t call(ncclComm* comm, cudaStream_t stream, Step step) {
  int own = comm->device, now = device_in_use();
  if (now != own) say("NCCL is called on device %d, and its communicator is of device %d", now, own);
  cudaStreamCaptureStatus captured;
  if (cudaStreamIsCapturing(stream, &captured); captured != cudaStreamCaptureStatusNone)
    return say("NCCL in a CUDA graph is not simulated"), ncclInvalidUsage;
  group.emplace_back(stream, std::move(step));
  return depth ? ncclSuccess : launch_group();
}
ncclResult_t collective(Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, int operation,
                        ncclComm* comm, cudaStream_t stream) {
  if (operation > ncclAvg) return ncclInvalidArgument;
  Terms terms{kind, type, operation, count};
  size_t size = count * TYPES[type].width, offset = kind == REDUCE_SCATTER ? comm->rank * size : 0;
  auto parts = std::make_shared<Parts>(comm->ranks);
  std::vector<Step> steps;
  for (int peer = 0; peer < comm->ranks && !comm->alone; ++peer) {
    steps.push_back(offer(comm, peer, from, terms));
    steps.push_back(take(comm, peer, terms, [=](int process, uint64_t address) {
      (*parts)[peer].resize(size);
      read_from(process, address + offset, (*parts)[peer].data(), size);
    }));
  }
  return call(comm, stream, [=]() mutable {
    std::erase_if(steps, [](Step& step) { return step(); });
    if (!steps.empty()) return false;
    if (comm->alone) return true;
    if (kind == ALL_REDUCE || kind == REDUCE_SCATTER) TYPES[type].reduce(*parts, to, count, operation);
    else for (char* next = (char*)to; auto& part : *parts) next = std::copy(part.begin(), part.end(), next);
    return true;
  });
}

// Meet the other ranks of the communicator called `name`; as in NCCL, this returns once all have come. NCCL would wait
// for ever; this gives up after SIMULATED_CUDA_JOIN_S (600) seconds.
ncclResult_t join(ncclComm_t* made, int ranks, const std::string& name, int rank) {
  int device = device_in_use();
  if (device < 0) return ncclUnhandledCudaError;
  ++communicators;
  *made = new ncclComm{ranks, rank, device, name};
  if (ALONE) return ncclSuccess;
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // where the kernel lets parents only read a process
  size_t size = sizeof(Shared) + 2 * ranks * ranks * sizeof(Post);
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, size)) return ncclSystemError;
  auto* shared = (*made)->shared = (Shared*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  shared->process[rank] = getpid();
  ++shared->joined;
  time_t end = time(nullptr) + setting("SIMULATED_CUDA_JOIN_S", 600);
  for (int looks = 0; shared->joined < ranks; pause(looks)) {
    if (time(nullptr) < end) continue;
    say("rank %d of %d waits for the others at the first use of communicator %s", rank, ranks, name.c_str());
    return ncclSystemError;
  }
  if (rank == 0) shm_unlink(name.c_str());
  return ncclSuccess;
}
}  // namespace

extern "C" {
int simulated_communicators() { return communicators; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return getentropy(id, sizeof *id) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  char name[64] = "/simulated-nccl-";
  for (int i = 0; i < 12; ++i) sprintf(name + strlen(name), "%02x", (unsigned char)id.internal[i]);
  return join(made, ranks, name, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRankConfig(made, ranks, *ids, rank, nullptr);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return comm->alone = true, ncclSuccess; }
ncclResult_t ncclGroupStart() { return ++depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : launch_group(); }
// As NCCL's for large messages: a send ends once its receiver has read it.
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream, offer(comm, peer, from, {.kind = MESSAGE, .count = count * TYPES[type].width}));
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  size_t size = count * TYPES[type].width;
  if (ALONE) cudaMemsetAsync(to, 0, size, stream);
  auto read = [=](int process, uint64_t address) { read_from(process, address, to, size); };
  return call(comm, stream, take(comm, peer, {.kind = MESSAGE, .count = size}, read));
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(ALL_REDUCE, from, to, count, type, operation, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t comm, cudaStream_t stream) {
  return collective(REDUCE_SCATTER, from, to, count, type, operation, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective(ALL_GATHER, from, to, count, type, ncclSum, comm, stream);
}
}
