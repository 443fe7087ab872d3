// What the simulated driver and the simulated NCCL share: settings, streams, errors.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

namespace simulated {
// The number in the environment variable `name`, or else `otherwise`.
long setting(const char* name, long otherwise);
// Print a line about this process to its standard error.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The device of the calling thread, on which this makes the context of the process; -1 in a forked process that cannot use CUDA.
int device_in_use(const char* function);
// Queue `work` behind everything that `stream` has.
void enqueue(cudaStream_t stream, std::function<void()> work);
// Pause between two looks at something that another thread or process does; `looks` counts them.
void pause(int& looks);
}  // namespace simulated

extern "C" {
// Make `message` the error of this process, which all further calls of CUDA return: the work of a stream has failed.
void simulated_fail(const char* message);
// What a function of a library of CUDA returns that is not simulated: success, or an error where values are computed.
int simulated_stub(const char* function);
}
