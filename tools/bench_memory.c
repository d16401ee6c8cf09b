/*
 * Memory of a benchmark.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_memory.h"

#include "cost.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20, SLAB = 256 << 20 };

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return value > UINT64_MAX - unit ? UINT64_MAX : (value + unit - 1) / unit * unit;
}

void *bench_take(bench_memory *m, bench_fill fill, size_t size, int64_t n0, int64_t n1)
{
    uint64_t bytes = cost_mul(size, cost_mul((uint64_t)n0, (uint64_t)n1));
    /* Large pieces begin a page of their own, so that none shares one with what is written beside it. */
    uint64_t offset = round_up(m->bytes, bytes < HUGE_PAGE ? BENCH_ALIGNMENT : HUGE_PAGE);
    m->pieces[m->count++] = (bench_piece){offset, bytes, cost_mul(size, (uint64_t)n1), fill};
    m->bytes = cost_add(offset, bytes);
    if (fill == BENCH_IDS)
        m->ids = m->bytes;
    char *base = fill == BENCH_IDS ? m->host : m->base;
    return base ? base + offset : NULL;
}

void *bench_there(const bench_memory *m, const void *ids)
{
    return m->base ? m->base + ((const char *)ids - m->host) : NULL;
}

void bench_send_ids(const bench_memory *m)
{
    if (m->device)
        m->device->copy_in(m->base, m->host, m->ids);
}

void *bench_huge(uint64_t bytes)
{
    uint64_t rounded = round_up(bytes, HUGE_PAGE);
    void *memory = rounded < SIZE_MAX ? aligned_alloc(HUGE_PAGE, rounded) : NULL;
#ifdef MADV_HUGEPAGE
    if (memory)
        (void)madvise(memory, rounded, MADV_HUGEPAGE); /* a wish */
#endif
    return memory;
}

bool bench_allocate(bench_memory *m)
{
    const bench_device *device = m->device;
    char *base = device ? device->allocate(m->bytes) : bench_huge(m->bytes);
    *m = (bench_memory){.device = device, .base = base, .host = device ? malloc(m->ids) : base};
    return m->base && m->host;
}

void bench_free(bench_memory *m)
{
    free(m->host);
    if (m->device)
        m->device->release(m->base);
    m->base = m->host = NULL;
}

/* ---- Values ------------------------------------------------------------------------------------- */

/* Eight bytes of values: the bits to keep of a random number, and those to set. */
static uint64_t values(bench_fill fill, uint64_t index)
{
    uint64_t x = bench_random(index);
    switch (fill) {
    case BENCH_BF16:
        return (x & 0x80FF80FF80FF80FFU) | 0x3F003F003F003F00U;
    case BENCH_E4M3:
    case BENCH_TOPICS:
        return (x & 0x8F8F8F8F8F8F8F8FU) | 0x3030303030303030U;
    case BENCH_WEIGHTS:
    case BENCH_SIGNED:
        return (x & 0x007FFFFF007FFFFFU) | 0x3F0000003F000000U;
    case BENCH_EMPTY:
    case BENCH_IDS:
        break;
    }
    return 0;
}

/* Bytes [first, end) of a piece; first is a multiple of 8. */
static void fill_part(const bench_memory *m, const bench_piece *p, uint64_t first, uint64_t end)
{
    for (uint64_t at = first; at < end; at += 8) {
        uint64_t eight = values(p->fill, (p->offset + at) / 8);
        memcpy(m->base + p->offset + at, &eight, end - at < 8 ? end - at : 8);
    }
}

static void fill_slab(const bench_memory *m, const bench_piece *p, uint64_t first, uint64_t end,
                      int32_t threads)
{
    uint64_t parts = (end - first + HUGE_PAGE - 1) / HUGE_PAGE;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (uint64_t i = 0; i < parts; i++) {
        uint64_t from = first + i * HUGE_PAGE;
        fill_part(m, p, from, end - from < HUGE_PAGE ? end : from + HUGE_PAGE);
    }
}

static void fill_device(const bench_memory *m)
{
    for (int i = 0; i < m->count; i++) {
        const bench_piece *p = &m->pieces[i];
        if (p->fill > BENCH_IDS)
            m->device->fill(m->base + p->offset, p->bytes, p->fill, (uint64_t)i, p->row);
    }
}

static void fill_host(const bench_memory *m, int32_t threads)
{
    bool slow = m->bytes > (uint64_t)4 * SLAB;
    for (int i = 0; i < m->count; i++) {
        const bench_piece *p = &m->pieces[i];
        for (uint64_t at = 0; at < p->bytes && p->fill > BENCH_IDS; at += SLAB) {
            uint64_t end = p->bytes - at < SLAB ? p->bytes : at + SLAB;
            fill_slab(m, p, at, end, threads);
            if (slow)
                tool_progress("fill (MiB)", (int64_t)((p->offset + end) >> 20), (int64_t)(m->bytes >> 20));
        }
    }
    if (slow)
        tool_progress("fill (MiB)", (int64_t)(m->bytes >> 20), (int64_t)(m->bytes >> 20));
}

void bench_fill_memory(const bench_memory *m, int32_t threads)
{
    if (m->device)
        fill_device(m);
    else
        fill_host(m, threads);
}

/* ---- What there is ------------------------------------------------------------------------------ */

/* The number after `key` in a file ("" for the first); UINT64_MAX if there is none. */
static uint64_t number_in(const char *path, const char *key)
{
    char line[256];
    uint64_t number = UINT64_MAX;
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        size_t length = strlen(key);
        if (strncmp(line, key, length) == 0 && sscanf(line + length, "%" SCNu64, &number) == 1)
            break;
        number = UINT64_MAX;
    }
    if (file)
        fclose(file);
    return number;
}

uint64_t bench_available(void)
{
    uint64_t system = cost_mul(number_in("/proc/meminfo", "MemAvailable:"), 1024);
    uint64_t most = number_in("/sys/fs/cgroup/memory.max", "");
    uint64_t used = number_in("/sys/fs/cgroup/memory.current", "");
    if (most != UINT64_MAX && used != UINT64_MAX) {
        uint64_t left = used < most ? most - used : 0;
        system = left < system ? left : system;
    }
    return system;
}
