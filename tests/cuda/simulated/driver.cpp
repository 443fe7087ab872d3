// A CUDA runtime and driver without a GPU, under the unmodified CUDA build of torch.
//
// Device memory is memory of the host, and a stream is a queue whose thread runs one thing after the other. Kernels of
// torch's own are not run. In the empty mode they do nothing; in the computing mode (SIMULATED_CUDA_COMPUTES=1) a launch is
// an error, since kernels.cpp computes what torch's operators do.
//
// Settings, from the environment: SIMULATED_CUDA_DEVICES (8), SIMULATED_CUDA_MIB (81920) and SIMULATED_CUDA_CONTEXT_MIB (500)
// of each device, SIMULATED_CUDA_CAPABILITY (80), SIMULATED_CUDA_DELAY_US (0): the longest of the random pauses before
// each piece of work, SIMULATED_CUDA_POISON (0): whether new memory is full of NaN. CUDA_DEVICE_MAX_CONNECTIONS is the
// number of queues that a device's streams share, as on a GPU.
#include "streams.h"

#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#undef cuMemGetAddressRange
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
#undef cudaMemcpyAsync
#undef cudaStreamGetCaptureInfo

namespace simulated {
long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

void say(const char* format, ...) {
  char line[700];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "simulated CUDA, process %d: %s\n", getpid(), line);
}

void pause(int& looks) { usleep(looks < 50 ? 20 : looks < 500 ? 100 : 1000); ++looks; }

namespace {
constexpr int MOST_DEVICES = 64;
constexpr size_t PAGE = 2 << 20;  // granularity of the driver's own allocations

const bool COMPUTES = setting("SIMULATED_CUDA_COMPUTES", 0);
const bool POISON = setting("SIMULATED_CUDA_POISON", 0);
const long DELAY_US = setting("SIMULATED_CUDA_DELAY_US", 0);
const size_t MEMORY = (size_t)setting("SIMULATED_CUDA_MIB", 81920) << 20;
const size_t CONTEXT = (size_t)setting("SIMULATED_CUDA_CONTEXT_MIB", 500) << 20;
const int CAPABILITY = setting("SIMULATED_CUDA_CAPABILITY", 80);

std::mutex& lock = *new std::mutex;  // of everything below; what threads may use at the end of the process is never freed
thread_local int device = 0;
thread_local cudaError_t last = cudaSuccess;
std::atomic<pid_t> started{0};
std::atomic<long> launches{0};
std::atomic<cudaError_t> broken{cudaSuccess};
bool has_context[MOST_DEVICES];
size_t used[MOST_DEVICES];

// The numbers of the devices that CUDA_VISIBLE_DEVICES shows, in its order.
std::vector<int> visible() {
  std::vector<int> found;
  int count = std::min<long>(setting("SIMULATED_CUDA_DEVICES", 8), MOST_DEVICES);
  const char* value = getenv("CUDA_VISIBLE_DEVICES");
  for (int each = 0; !value && each < count; ++each) found.push_back(each);
  for (const char* part = value; part && *part;) {
    bool is_name = !strncmp(part, "GPU-", 4);
    const char* end = part + strcspn(part, ",");
    int number = is_name ? (int)strtol(std::string(end - 2, end).c_str(), nullptr, 16) - 1 : atoi(part);
    if (number < 0 || number >= count || (!is_name && !isdigit(*part))) break;
    found.push_back(number);
    part = *end ? end + 1 : end;
  }
  return found;
}

// Those that this process sees, which are fixed once it uses CUDA.
const std::vector<int>& devices() {
  thread_local std::vector<int> now;
  if (started == getpid()) {
    static const auto& fixed = *new std::vector<int>(visible());
    return fixed;
  }
  now = visible();
  return now;
}

cudaError_t error(cudaError_t code) { if (code != cudaSuccess) last = code; return code; }

bool start() { pid_t none = 0; return started.compare_exchange_strong(none, getpid()) || none == getpid(); }

// Work that a thread may wait for. A record of an event is one.
struct Signal {
  std::atomic<bool> done{false};
  timespec at{};
  std::mutex mutex;
  std::condition_variable changed;
  void set() {
    clock_gettime(CLOCK_MONOTONIC, &at);
    std::lock_guard<std::mutex> guard(mutex);
    done = true;
    changed.notify_all();
  }
  void wait() { std::unique_lock<std::mutex> guard(mutex); changed.wait(guard, [&] { return done.load(); }); }
};

// A hardware queue: it runs what it gets, one thing after the other.
struct Queue {
  std::deque<std::function<void()>> work;
  std::mutex mutex;
  std::condition_variable changed;
  bool running = false;
  void push(std::function<void()> next) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!running) { running = true; std::thread([this] { run(); }).detach(); }
    work.push_back(std::move(next));
    changed.notify_all();
  }
  void run() {
    prctl(PR_SET_NAME, "simulated-queue");
    std::minstd_rand random(setting("SIMULATED_CUDA_SEED", 0) + (uintptr_t)this / 64 % 1000);
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> guard(mutex);
        changed.wait(guard, [&] { return !work.empty(); });
        next = std::move(work.front());
        work.pop_front();
      }
      if (DELAY_US) usleep(random() % (DELAY_US + 1));
      next();
    }
  }
};

struct Stream {
  int of_device;
  Queue* queue;
  std::atomic<long> pending{0};
  void push(std::function<void()> work) {
    ++pending;
    queue->push([this, work = std::move(work)] { work(); --pending; });
  }
  void synchronize() {
    if (!pending) return;
    auto signal = std::make_shared<Signal>();
    push([signal] { signal->set(); });
    signal->wait();
  }
};

struct Event {
  std::shared_ptr<Signal> signal;  // of the last record, if any
};

std::map<int, Stream*>& default_streams = *new std::map<int, Stream*>;
std::vector<Stream*>& streams = *new std::vector<Stream*>;
std::map<int, std::vector<Queue*>>& queues = *new std::map<int, std::vector<Queue*>>;

// A new stream of the calling thread's device; `lock` is held.
Stream* make_stream() {
  static const size_t connections = std::max(1L, setting("CUDA_DEVICE_MAX_CONNECTIONS", 8));
  static auto& counts = *new std::map<int, size_t>;
  auto& of_device = queues[device];
  size_t number = counts[device]++;
  if (of_device.size() < connections) of_device.push_back(new Queue);
  auto* made = new Stream{device, of_device[number % connections]};
  streams.push_back(made);
  return made;
}

Stream* stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;  // 0 and 1 are the device's default stream, 2 the thread's
  std::lock_guard<std::mutex> guard(lock);
  auto& found = default_streams[device];
  if (!found) found = make_stream();
  return found;
}

void synchronize(int of_device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (auto* each : streams)
      if (each->of_device == of_device) all.push_back(each);
  }
  for (auto* each : all) each->synchronize();
}

struct Block {
  size_t size;
  bool on_device;
  int of_device;
  size_t charged;  // bytes of the device's memory that it takes
};
std::map<char*, Block>& blocks = *new std::map<char*, Block>;

bool find(const void* address, Block* block, char** base = nullptr) {
  std::lock_guard<std::mutex> guard(lock);
  auto next = blocks.upper_bound((char*)address);
  if (next == blocks.begin()) return false;
  --next;
  if ((char*)address >= next->first + next->second.size) return false;
  *block = next->second;
  if (base) *base = next->first;
  return true;
}

// Take memory of `of_device`, if it has so much.
bool charge(int of_device, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  if (used[of_device] + bytes > MEMORY) return false;
  used[of_device] += bytes;
  return true;
}

void give_back(int of_device, size_t bytes) { std::lock_guard<std::mutex> guard(lock); used[of_device] -= bytes; }

void* reserve(size_t size, int access) {
  void* found = mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

void* take(size_t size, bool on_device, size_t charged) {
  size = std::max<size_t>(1, (size + 4095) / 4096) * 4096;
  void* address = reserve(size, PROT_READ | PROT_WRITE);
  if (POISON && address) memset(address, 0xff, size);
  std::lock_guard<std::mutex> guard(lock);
  if (address) blocks[(char*)address] = {size, on_device, device, charged};
  return address;
}

void release(void* address, const Block& block) {
  {
    std::lock_guard<std::mutex> guard(lock);
    blocks.erase((char*)address);
    if (block.on_device) used[block.of_device] -= block.charged;
  }
  munmap(address, block.size);
}

std::map<const void*, std::string>& kernel_names = *new std::map<const void*, std::string>;

// A kernel of torch's own is launched.
cudaError_t launch(const void* kernel) {
  ++launches;
  if (!COMPUTES) return cudaSuccess;
  std::string name = "a kernel";
  {
    std::lock_guard<std::mutex> guard(lock);
    if (auto found = kernel_names.find(kernel); found != kernel_names.end()) name = found->second;
  }
  int status;
  char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  say("nothing computes this kernel: %.500s", readable ? readable : name.c_str());
  free(readable);
  return error(cudaErrorNotSupported);
}
}  // namespace

int device_in_use(const char* function) {
  if (!start()) return -1;
  std::lock_guard<std::mutex> guard(lock);
  if (!has_context[device]) {
    has_context[device] = true;
    used[device] += CONTEXT;
    if (setting("SIMULATED_CUDA_LOG", 0)) say("%s makes a context on device %d", function, device);
  }
  return device;
}

void enqueue(cudaStream_t stream, std::function<void()> work) { stream_of(stream)->push(std::move(work)); }
}  // namespace simulated

using namespace simulated;

// Every call that uses the calling thread's device begins with this.
#define ON_DEVICE                                                       \
  if (device_in_use(__func__) < 0) return error(cudaErrorInitializationError); \
  if (broken != cudaSuccess) return error(broken)

extern "C" {
void simulated_fail(const char* message) { say("%s", message); broken = cudaErrorLaunchFailure; }

int simulated_stub(const char* function) {
  if (!COMPUTES) return 0;
  say("%s is not simulated", function);
  return cudaErrorNotSupported;
}

long simulated_launches() { return launches; }
int simulated_has_context(int of_device) { return has_context[of_device]; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices().size();
  if (!*count) return error(cudaErrorNoDevice);
  return start() ? cudaSuccess : error(cudaErrorInitializationError);
}
cudaError_t cudaGetDevice(int* found) { *found = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int wanted) {
  if (wanted < 0 || wanted >= (int)devices().size()) return error(cudaErrorInvalidDevice);
  device = wanted;
  ON_DEVICE;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorSimulated";
}
const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported by the simulated CUDA";
    default: return "an error of the simulated CUDA";
  }
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// The sizes are those of an A100.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int of_device) {
  if (!start()) return error(cudaErrorInitializationError);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Simulated GPU");
  int number = devices()[of_device];
  found->uuid.bytes[15] = number + 1;
  found->pciBusID = 0x10 + number;
  found->pciDomainID = 0xfff0;
  found->major = CAPABILITY / 10;
  found->minor = CAPABILITY % 10;
  found->totalGlobalMem = MEMORY;
  found->warpSize = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->multiProcessorCount = 108;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 166912;
  found->sharedMemPerMultiprocessor = 167936;
  found->l2CacheSize = 40 << 20;
  found->memoryBusWidth = 5120;
  found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = found->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of_device) {
  cudaDeviceProp all;
  if (auto code = cudaGetDeviceProperties(&all, of_device)) return code;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = all.warpSize; break;
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = all.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = all.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = all.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = all.maxGridSize[1]; break;
    case cudaDevAttrTextureAlignment: *value = 512; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int of_device) {
  snprintf(text, size, "FFF0:%02X:00.0", 0x10 + devices()[of_device]);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { ON_DEVICE; synchronize(device); return broken; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = (cudaMemPool_t)0x10; return cudaSuccess; }

// Memory
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ON_DEVICE;
  std::lock_guard<std::mutex> guard(lock);
  *total = MEMORY;
  *free = MEMORY - std::min(MEMORY, used[device]);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t size) {
  ON_DEVICE;
  size_t charged = (size + PAGE - 1) / PAGE * PAGE;
  *address = nullptr;
  if (!charge(device, charged)) return error(cudaErrorMemoryAllocation);
  *address = take(size, true, charged);
  return *address ? cudaSuccess : error(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* address) {
  ON_DEVICE;
  Block block;
  if (!address || !find(address, &block)) return cudaSuccess;
  synchronize(block.of_device);
  release(address, block);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  ON_DEVICE;
  *address = take(size, false, 0);
  return *address ? cudaSuccess : error(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* address) {
  ON_DEVICE;
  Block block;
  if (find(address, &block)) release(address, block);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  ON_DEVICE;
  std::lock_guard<std::mutex> guard(lock);
  blocks[(char*)address] = {size, false, device, 0};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  blocks.erase((char*)address);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  ON_DEVICE;
  memset(found, 0, sizeof *found);
  Block block;
  if (!find(address, &block)) { found->type = cudaMemoryTypeUnregistered; found->device = -2; return cudaSuccess; }
  found->type = block.on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = block.of_device;
  found->devicePointer = found->hostPointer = (void*)address;
  return cudaSuccess;
}

// A copy from or to pageable memory of the host ends before the call does, a copy of other memory in the order of its stream.
static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream, bool waits) {
  Block ignored;
  waits = waits || !find(to, &ignored) || !find(from, &ignored);
  enqueue(stream, [=] { memmove(to, from, size); });
  if (waits) stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  ON_DEVICE;
  return copy(to, from, size, stream, false);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  ON_DEVICE;
  return copy(to, from, size, nullptr, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  ON_DEVICE;
  return copy(to, from, size, stream, false);
}
cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ON_DEVICE;
  Block ignored;
  enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) memmove((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
  });
  if (!find(to, &ignored) || !find(from, &ignored)) stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  ON_DEVICE;
  enqueue(stream, [=] { memset(to, value, size); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// Streams
static cudaError_t create(cudaStream_t* stream) {
  std::lock_guard<std::mutex> guard(lock);
  *stream = (cudaStream_t)make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { ON_DEVICE; return create(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ON_DEVICE;
  return stream_of(stream)->pending ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { ON_DEVICE; stream_of(stream)->synchronize(); return broken; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ON_DEVICE;
  auto signal = ((Event*)event)->signal;
  if (signal && !signal->done) enqueue(stream, [signal] { signal->wait(); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ON_DEVICE;
  enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  ON_DEVICE;
  enqueue(stream, [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// Events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ON_DEVICE;
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  ON_DEVICE;
  auto signal = std::make_shared<Signal>();
  ((Event*)event)->signal = signal;
  enqueue(stream, [signal] { signal->set(); });
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ON_DEVICE;
  auto signal = ((Event*)event)->signal;
  return !signal || signal->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ON_DEVICE;
  auto signal = ((Event*)event)->signal;
  if (signal) signal->wait();
  return broken;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  auto begun = ((Event*)from)->signal, ended = ((Event*)to)->signal;
  if (!begun || !ended) return error(cudaErrorInvalidResourceHandle);
  if (!begun->done || !ended->done) return error(cudaErrorNotReady);
  *milliseconds = (ended->at.tv_sec - begun->at.tv_sec) * 1e3 + (ended->at.tv_nsec - begun->at.tv_nsec) / 1e6;
  return cudaSuccess;
}

// Kernels
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = CAPABILITY;
  found->maxDynamicSharedSizeBytes = 166912;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  ON_DEVICE;
  return launch(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  ON_DEVICE;
  return launch(kernel);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  ON_DEVICE;
  return launch(kernel);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  ON_DEVICE;
  return launch((const void*)kernel);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  if (COMPUTES) kernel_names[function] = name;  // libraries are loaded one after the other
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char memory[1 << 16];
  *address = memory;
  return cudaSuccess;
}

// The driver: what torch's allocator uses for expandable segments, and what Python asks before it starts CUDA.
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = (CUdeviceptr)reserve(size, PROT_NONE);
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(lock);
  blocks[(char*)*address] = {size, true, device, 0};
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  { std::lock_guard<std::mutex> guard(lock); blocks.erase((char*)address); }
  munmap((void*)address, size);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted, unsigned long long) {
  if (!charge(wanted->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = size << 6 | wanted->location.id;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  give_back(handle & 63, handle >> 6);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  mprotect((void*)address, size, PROT_READ | PROT_WRITE);
  if (POISON) memset((void*)address, 0xff, size);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {  // an access from now on is a memory fault
  madvise((void*)address, size, MADV_DONTNEED);
  mprotect((void*)address, size, PROT_NONE);
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  Block block;
  char* found;
  if (!find((void*)address, &block, &found)) return CUDA_ERROR_INVALID_VALUE;
  *base = (CUdeviceptr)found;
  *size = block.size;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = cudaGetErrorString((cudaError_t)code);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { *value = 1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { *context = (CUcontext)0x20; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* found, int number) { *found = number; return CUDA_SUCCESS; }
static CUresult unknown() { return (CUresult)simulated_stub("a function of the driver"); }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void*)unknown;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
CUresult cuDriverGetVersion(int* version) { return (CUresult)cudaDriverGetVersion(version); }
CUresult cuDeviceGetCount(int* count) { *count = devices().size(); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice of_device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context[of_device];
  return CUDA_SUCCESS;
}

// NVML, as far as torch counts devices by it
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = std::min<long>(setting("SIMULATED_CUDA_DEVICES", 8), MOST_DEVICES);
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** handle) {
  *handle = (void*)(uintptr_t)(number + 1);
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { return nvmlDeviceGetHandleByIndex_v2(0, handle); }
int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  snprintf(text, size, "GPU-00000000-0000-0000-0000-0000000000%02lx", (unsigned long)handle);
  return 0;
}
const char* nvmlErrorString(int) { return "an error of the simulated NVML"; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return cudaDriverGetVersion(version); }

size_t cudnnGetVersion() { return 92000; }

// cuBLAS in the empty mode: handles and descriptions that torch's code reads back. Its header needs more than torch installs.
constexpr size_t HEURISTIC = 96;  // bytes of a cublasLtMatmulHeuristicResult_t; zero is success
static int make(void** handle) { *handle = calloc(1, 512); return 0; }
static int destroy(void* handle) { free(handle); return 0; }
static int zero(int* mode) { *mode = 0; return 0; }
int cublasCreate_v2(void** handle) { return make(handle); }
int cublasGetMathMode(void*, int* mode) { return zero(mode); }
int cublasGetPointerMode_v2(void*, int* mode) { return zero(mode); }
int cublasLtMatmulDescCreate(void** made, int, int) { return make(made); }
int cublasLtMatmulDescDestroy(void* made) { return destroy(made); }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return make(made); }
int cublasLtMatrixLayoutDestroy(void* made) { return destroy(made); }
int cublasLtMatmulPreferenceCreate(void** made) { return make(made); }
int cublasLtMatmulPreferenceDestroy(void* made) { return destroy(made); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, HEURISTIC);
  *count = 1;
  return simulated_stub(__func__);
}
}
