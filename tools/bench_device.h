/*
 * What `csa bench` needs of a GPU: memory, random values, a clock, its limits. The command links no CUDA
 * library: this is the table of libcsa_bench_cuda.so (cuda/), opened when the cuda back end is asked for.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_DEVICE_H
#define CSA_TOOL_BENCH_DEVICE_H

#include "bench_limits.h"

/* What memory is filled with. On a device, normal numbers take the place of even ones. */
typedef enum bench_fill {
    BENCH_EMPTY,   /* nothing: written by others */
    BENCH_IDS,     /* nothing: written by the host */
    BENCH_BF16,    /* +-[0.5, 2) */
    BENCH_E4M3,    /* the same */
    BENCH_TOPICS,  /* the same; on a device two thirds of a row are what 64 rows share */
    BENCH_WEIGHTS, /* fp32 in [0.5, 1), on a device too */
    BENCH_SIGNED   /* fp32 in [0.5, 1) */
} bench_fill;

/* One device, one stream. Nothing is returned of errors: after the first one calls do nothing, and error() says
 * what it was. */
typedef struct bench_device {
    size_t size;                /* sizeof(bench_device): both are of one build */
    const char *(*error)(void); /* NULL: none so far */
    /* Chooses device 0; its name and the bytes of its L2 cache. */
    void (*open)(char *name, size_t capacity, size_t *cache);
    uint64_t (*available)(void); /* bytes that can be allocated */
    void *(*allocate)(uint64_t bytes);
    void (*release)(void *memory);
    /* `row` bytes belong together, where that matters to the kind of values. */
    void (*fill)(void *memory, uint64_t bytes, bench_fill fill, uint64_t seed, uint64_t row);
    void (*copy_in)(void *to, const void *from, uint64_t bytes);
    /* Zeros the first `width` bytes of each `pitch`. */
    void (*clear)(void *memory, size_t pitch, size_t width, size_t rows);
    /* What is queued on the stream between begin and end becomes a graph. */
    void *(*stream)(void);
    void (*begin)(void);
    void (*end)(void);
    /* Seconds of one replay; cold: the L2 cache is flushed before. */
    double (*replay)(bool cold);
    bench_limits (*limits)(void);
} bench_device;

#define BENCH_DEVICE_ENTRY "csa_bench_device" /* the one symbol of libcsa_bench_cuda.so */
typedef const bench_device *bench_device_fn(void);

/* The device, opened; NULL after saying why not, *code is then the exit code. */
const bench_device *bench_device_open(char *name, size_t capacity, size_t *cache, int *code);

/* Exit code; says what failed. */
int bench_device_check(const bench_device *device);

#endif
