// What the simulated driver, NCCL and kernels share: settings, streams, errors.
#pragma once
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated {
// The number in the environment variable `name`, or else `otherwise`.
long setting(const char* name, long otherwise);
// The device of the calling thread, on which this makes the context of the process; -1 in a forked process.
int device_in_use();
// Queue `work` behind everything that `stream` has. It may run again, if it becomes a part of a graph.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
// Make `message` the error of this process, which all further calls of CUDA return: the work of a stream has failed.
void fail(const std::string& message);
// Print a line about this process to its standard error.
template <class... Values>
void say(const std::string& format, Values... values) {
  fprintf(stderr, ("simulated CUDA, process %d: " + format + "\n").c_str(), getpid(), values...);
}
}  // namespace simulated
