/*
 * What the files of libcsa_bench_cuda.so share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_CUDA_DEVICE_H
#define CSA_TOOL_CUDA_DEVICE_H

#include "bench_device.h"

#include <cuda_runtime.h>

/* True if all is well so far; the first error is kept. */
bool device_check(cudaError_t error, const char *what);

cudaStream_t device_stream();

void device_fill(void *memory, uint64_t bytes, bench_fill fill, uint64_t seed, uint64_t row);

bench_limits device_limits();

#endif
