/*
 * What this machine can do at most, measured: the limits that `csa bench` holds each stage against.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_LIMITS_H
#define CSA_TOOL_BENCH_LIMITS_H

#include "tool.h"

/* Bytes and operations per second, of `threads` threads together. */
typedef struct bench_limits {
    int32_t threads;  /* 0: a device's */
    double stream;    /* reading memory from one end to the other */
    double cache;     /* the same, over a quarter of the last-level cache again and again */
    double gather[2]; /* regions from all over the memory: of a bf16 cache (6144 bytes), e4m3 (3072) */
    double bf16;      /* dot products of bf16 pairs summed in fp32; 0 if no instruction does that */
    double fp32;      /* fused multiply-adds; 0: not measured */
} bench_limits;

enum { BENCH_MACHINE_BYTES = 512 << 20 };

/* The memory that limits are measured on. */
typedef struct bench_machine {
    void *buffer;
    size_t bytes;
    size_t last_cache; /* bytes of the last-level cache, as the system says, or a guess */
} bench_machine;

/* Without memory to measure on, only last_cache is known. False if memory is short. */
bool bench_machine_open(bench_machine *machine, bool memory);
void bench_machine_close(bench_machine *machine);

/* Each figure is the best of many short passes and, for reading, of several ways to read. */
bench_limits bench_measure_limits(const bench_machine *machine, int32_t threads);

/* Reads enough memory for nothing else to stay in a cache. */
void bench_flush(const bench_machine *machine, int32_t threads);

/* The processor's name. */
void bench_processor(char *text, size_t capacity);

/* Programs that wanted to run in the last minute, on average; 0 if the system does not say. */
double bench_load(void);

#endif
