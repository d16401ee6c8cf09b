/*
 * Memory of a benchmark: one block, laid out twice by the same function. The first time only the bytes are
 * counted, so that what does not fit is refused before anything is allocated.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_MEMORY_H
#define CSA_TOOL_BENCH_MEMORY_H

#include "bench_device.h"

enum {
    BENCH_PIECES = 48,
    BENCH_ALIGNMENT = 256 /* what a workspace needs */
};

typedef struct bench_piece {
    uint64_t offset, bytes, row; /* a row is all of n1 */
    bench_fill fill;
} bench_piece;

typedef struct bench_memory {
    const bench_device *device; /* where the memory lies; NULL: on the host */
    char *base;                 /* NULL while counting */
    char *host;                 /* what the host writes: base, or a device's ids, which come first */
    uint64_t ids;               /* bytes from the beginning to the end of the last ids */
    uint64_t bytes;             /* sticks at UINT64_MAX */
    bench_piece pieces[BENCH_PIECES];
    int count;
} bench_memory;

/* A piece of n0 * n1 elements of `size` bytes; NULL while counting. Ids are the host's to write, and come
 * first. */
void *bench_take(bench_memory *memory, bench_fill fill, size_t size, int64_t n0, int64_t n1);

/* Where the library finds ids. */
void *bench_there(const bench_memory *memory, const void *ids);

/* Copies them there. */
void bench_send_ids(const bench_memory *memory);

/* After counting: allocates what was counted, asks for huge pages, and begins anew. False without memory. */
bool bench_allocate(bench_memory *memory);
void bench_free(bench_memory *memory);

/* Fills all pieces on `threads` threads, with the same values for any number of them. Draws progress if that
 * takes long. */
void bench_fill_memory(const bench_memory *memory, int32_t threads);

/* Bytes that can be allocated without swapping: what the system has and what a control group leaves. */
uint64_t bench_available(void);

/* `bytes` of their own, 2 MiB aligned, huge pages asked for; NULL without memory. To be freed with free(). */
void *bench_huge(uint64_t bytes);

/* One of 2^64 numbers for each index. */
static inline uint64_t bench_random(uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15U;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
    x = (x ^ x >> 27) * 0x94D049BB133111EBU;
    return x ^ x >> 31;
}

#endif
