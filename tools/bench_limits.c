/*
 * What this machine can do at most. The loops here do nothing but load, or multiply and add.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "bench_limits.h"

#include "bench_memory.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    DEFAULT_CACHE = 32 << 20,
    PASS = 64 << 20,                         /* bytes of a pass: a few milliseconds, and no cache holds them */
    REGION_BYTES = CSA_REGION * CSA_KV_SIZE, /* of an e4m3 cache */
    LEAST_PASSES = 3
};

/* Of arithmetic in a pass: half a millisecond or so. Read anew each time, or one pass's sums would do for all.
 */
static volatile int rounds_of_pass = 200000;

/* Passes are short and many, so that some of them run undisturbed. */
static const double seconds_of_passes = 0.1;

/* What a pass computes goes here, so that it has to be computed. */
static volatile _Atomic uint64_t sink;

static void keep(uint64_t result)
{
    atomic_store_explicit(&sink, result, memory_order_relaxed);
}

/* ---- Reading ------------------------------------------------------------------------------------ */

typedef uint64_t line __attribute__((vector_size(64), may_alias));

/* Reads two places at once and asks for two others. The vectors are as long as the caller's instructions. */
static inline __attribute__((always_inline)) uint64_t read_two(const char *a, const char *b, size_t bytes,
                                                               const char *next_a, const char *next_b)
{
    line sums[4] = {{0}};
    for (size_t i = 0; i < bytes; i += 128) {
        __builtin_prefetch(next_a + i, 0, 2);
        __builtin_prefetch(next_a + i + 64, 0, 2);
        __builtin_prefetch(next_b + i, 0, 2);
        __builtin_prefetch(next_b + i + 64, 0, 2);
        sums[0] += *(const line *)(a + i);
        sums[1] += *(const line *)(a + i + 64);
        sums[2] += *(const line *)(b + i);
        sums[3] += *(const line *)(b + i + 64);
    }
    line sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return sum[0] + sum[3] + sum[7];
}

static inline __attribute__((always_inline)) uint64_t read_one(const char *a, size_t bytes)
{
    line sums[4] = {{0}};
    for (size_t i = 0; i < bytes; i += 256)
        for (size_t j = 0; j < 4; j++)
            sums[j] += *(const line *)(a + i + 64 * j);
    line sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return sum[0] + sum[3] + sum[7];
}

typedef uint64_t (*two_reader)(const char *a, const char *b, size_t bytes, const char *next_a,
                               const char *next_b);
typedef uint64_t (*one_reader)(const char *a, size_t bytes);

static uint64_t two_plain(const char *a, const char *b, size_t bytes, const char *next_a, const char *next_b)
{
    return read_two(a, b, bytes, next_a, next_b);
}

static uint64_t one_plain(const char *a, size_t bytes)
{
    return read_one(a, bytes);
}

/* ---- Arithmetic: what a pass takes operations for ----------------------------------------------- */

/* Returns the operations of `rounds` rounds. */
typedef double (*arithmetic)(int rounds);

static double fma_plain(int rounds)
{
    float sums[64];
    for (int j = 0; j < 64; j++)
        sums[j] = (float)(rounds + j);
    for (int i = 0; i < rounds; i++)
#pragma omp simd
        for (int j = 0; j < 64; j++)
#ifdef FP_FAST_FMAF
            sums[j] = fmaf(sums[j], 0.5F, 1.0F);
#else
            sums[j] = sums[j] * 0.5F + 1.0F;
#endif
    keep((uint64_t)sums[rounds % 64]);
    return 2.0 * 64 * rounds;
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) static uint64_t two_avx512(const char *a, const char *b, size_t bytes,
                                                              const char *next_a, const char *next_b)
{
    return read_two(a, b, bytes, next_a, next_b);
}

__attribute__((target("avx512f"))) static uint64_t one_avx512(const char *a, size_t bytes)
{
    return read_one(a, bytes);
}

__attribute__((target("avx2"))) static uint64_t two_avx2(const char *a, const char *b, size_t bytes,
                                                         const char *next_a, const char *next_b)
{
    return read_two(a, b, bytes, next_a, next_b);
}

__attribute__((target("avx2"))) static uint64_t one_avx2(const char *a, size_t bytes)
{
    return read_one(a, bytes);
}

/* As many sums as hide the latency of two units, and fit into the registers. They begin with different values,
 * or one of them would do for all. */
enum { SUMS_512 = 16, SUMS_256 = 12 };

__attribute__((target("avx2,fma"))) static double fma_avx2(int rounds)
{
    __m256 sums[SUMS_256], half = _mm256_set1_ps(0.5F), one = _mm256_set1_ps(1);
    for (int j = 0; j < SUMS_256; j++)
        sums[j] = _mm256_set1_ps((float)(rounds + j));
    for (int i = 0; i < rounds; i++)
        for (int j = 0; j < SUMS_256; j++)
            sums[j] = _mm256_fmadd_ps(sums[j], half, one);
    for (int j = 1; j < SUMS_256; j++)
        sums[0] = _mm256_add_ps(sums[0], sums[j]);
    keep((uint64_t)_mm256_cvtss_f32(sums[0]));
    return 2.0 * 8 * SUMS_256 * rounds;
}

__attribute__((target("avx512f"))) static double fma_avx512(int rounds)
{
    __m512 sums[SUMS_512], half = _mm512_set1_ps(0.5F), one = _mm512_set1_ps(1);
    for (int j = 0; j < SUMS_512; j++)
        sums[j] = _mm512_set1_ps((float)(rounds + j));
    for (int i = 0; i < rounds; i++)
        for (int j = 0; j < SUMS_512; j++)
            sums[j] = _mm512_fmadd_ps(sums[j], half, one);
    for (int j = 1; j < SUMS_512; j++)
        sums[0] = _mm512_add_ps(sums[0], sums[j]);
    keep((uint64_t)_mm512_cvtss_f32(sums[0]));
    return 2.0 * 16 * SUMS_512 * rounds;
}

__attribute__((target("avx512f,avx512bf16"))) static double dot_avx512(int rounds)
{
    __m512 sums[SUMS_512];
    __m512i small = _mm512_set1_epi16(0x3800); /* 2^-15: the sums stay finite */
    for (int j = 0; j < SUMS_512; j++)
        sums[j] = _mm512_set1_ps((float)(rounds + j));
    for (int i = 0; i < rounds; i++)
        for (int j = 0; j < SUMS_512; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)small, (__m512bh)small);
    for (int j = 1; j < SUMS_512; j++)
        sums[0] = _mm512_add_ps(sums[0], sums[j]);
    keep((uint64_t)_mm512_cvtss_f32(sums[0]));
    return 4.0 * 16 * SUMS_512 * rounds;
}

#endif

typedef struct loops {
    two_reader two;
    one_reader one;
    arithmetic fma, dot; /* dot may be NULL */
} loops;

static loops choose_loops(void)
{
    loops l = {two_plain, one_plain, fma_plain, NULL};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        l = (loops){two_avx512, one_avx512, fma_avx512, NULL};
        if (__builtin_cpu_supports("avx512bf16"))
            l.dot = dot_avx512;
    } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        l = (loops){two_avx2, one_avx2, fma_avx2, NULL};
    }
#endif
    return l;
}

/* ---- Passes ------------------------------------------------------------------------------------- */

/* One way to read. */
typedef struct reading {
    const char *base;
    size_t bytes; /* of the memory at base */
    size_t pass;  /* bytes that all threads together read at a time: a part of them */
    int repeats;  /* how often, in a pass */
    size_t piece; /* of gathered pieces; 0: a stream */
    size_t ahead; /* of a stream: from what is read to what is asked for; 0: leave that to the machine */
} reading;

static const char *random_piece(const reading *r, uint64_t index)
{
    return r->base + bench_random(index) % (r->bytes / r->piece) * r->piece;
}

static uint64_t gather(const loops *l, const reading *r, uint64_t seed, int32_t threads)
{
    uint64_t pieces = r->pass / r->piece / (uint64_t)threads, first = seed * r->pass, sum = 0;
    const char *a = random_piece(r, first), *b = random_piece(r, first + 1);
    for (uint64_t i = first + 2; i < first + pieces + 2; i += 2) {
        const char *next_a = random_piece(r, i), *next_b = random_piece(r, i + 1);
        sum += l->two(a, b, r->piece, next_a, next_b);
        a = next_a;
        b = next_b;
    }
    return sum;
}

/* Passes go through the memory share by share. */
static uint64_t stream(const loops *l, const reading *r, uint64_t number, int32_t threads)
{
    size_t share = r->pass / (size_t)threads / 512 * 512;
    const char *start = r->base + number % (r->bytes / share) * share, *half = start + share / 2;
    if (r->ahead)
        return l->two(start, half, share / 2, start + r->ahead, half + r->ahead);
    return l->one(start, share);
}

/* Returns bytes per second. */
static double read_pass(const loops *l, const reading *r, int pass, int32_t threads)
{
    double start = tool_seconds();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int32_t t = 0; t < threads; t++) {
        uint64_t number = (uint64_t)pass * (uint64_t)threads + (uint64_t)t;
        for (int i = 0; i < r->repeats; i++)
            keep(r->piece ? gather(l, r, number, threads) : stream(l, r, number, threads));
    }
    return (double)r->pass * r->repeats / (tool_seconds() - start);
}

static double best_read(const loops *l, const reading *r, int32_t threads)
{
    double best = 0, start = tool_seconds();
    for (int pass = 0; pass < LEAST_PASSES || tool_seconds() - start < seconds_of_passes; pass++)
        best = fmax(best, read_pass(l, r, pass, threads));
    return best;
}

/* Over the first `bytes` of the buffer. */
static double best_stream(const loops *l, const bench_machine *m, size_t bytes, int32_t threads)
{
    static const size_t ahead[] = {0, 1024, 4096};
    double best = 0;
    for (size_t i = 0; i < sizeof ahead / sizeof *ahead; i++) {
        reading r = {.base = m->buffer, .bytes = bytes, .pass = PASS, .repeats = 1, .ahead = ahead[i]};
        if (bytes < PASS) {
            r.pass = bytes;
            r.repeats = (int)(PASS / bytes);
        }
        best = fmax(best, best_read(l, &r, threads));
    }
    return best;
}

static double best_gather(const loops *l, const bench_machine *m, size_t piece, int32_t threads)
{
    reading r = {.base = m->buffer, .bytes = m->bytes, .pass = PASS, .repeats = 1, .piece = piece};
    return best_read(l, &r, threads);
}

static double arithmetic_pass(arithmetic run, int32_t threads)
{
    double operations = 0, start = tool_seconds();
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : operations)
    for (int32_t t = 0; t < threads; t++)
        operations += run(rounds_of_pass);
    return operations / (tool_seconds() - start);
}

static double best_arithmetic(arithmetic run, int32_t threads)
{
    double best = 0, start = tool_seconds();
    for (int pass = 0; run && (pass < LEAST_PASSES || tool_seconds() - start < seconds_of_passes); pass++)
        best = fmax(best, arithmetic_pass(run, threads));
    return best;
}

/* ---- The whole ---------------------------------------------------------------------------------- */

/* The C library may know the sum over all of the machine's caches; the kernel knows the one that is shared. */
static size_t last_cache(void)
{
    unsigned kib = 0;
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    if (file && fscanf(file, "%uK", &kib) != 1)
        kib = 0;
    if (file)
        fclose(file);
    return kib ? (size_t)kib << 10 : DEFAULT_CACHE;
}

bool bench_machine_open(bench_machine *m, bool memory)
{
    *m = (bench_machine){.last_cache = last_cache()};
    if (!memory)
        return true;
    m->buffer = bench_huge(BENCH_MACHINE_BYTES);
    if (m->buffer)
        memset(m->buffer, 1, BENCH_MACHINE_BYTES);
    m->bytes = BENCH_MACHINE_BYTES;
    return m->buffer != NULL;
}

void bench_machine_close(bench_machine *m)
{
    free(m->buffer);
    m->buffer = NULL;
}

bench_limits bench_measure_limits(const bench_machine *m, int32_t threads)
{
    loops l = choose_loops();
    size_t cached = m->last_cache / 4 < m->bytes ? m->last_cache / 4 : m->bytes;
    return (bench_limits){
        .threads = threads,
        .stream = best_stream(&l, m, m->bytes, threads),
        .cache = best_stream(&l, m, cached, threads),
        .gather = {best_gather(&l, m, 2 * (size_t)REGION_BYTES, threads),
                   best_gather(&l, m, REGION_BYTES, threads)},
        .bf16 = best_arithmetic(l.dot, threads),
        .fp32 = best_arithmetic(l.fma, threads),
    };
}

void bench_flush(const bench_machine *m, int32_t threads)
{
    loops l = choose_loops();
    size_t bytes = m->last_cache * 2 < m->bytes ? m->last_cache * 2 : m->bytes;
    reading r = {.base = m->buffer, .bytes = m->bytes, .pass = bytes, .repeats = 1};
    read_pass(&l, &r, 0, threads);
}

void bench_processor(char *text, size_t capacity)
{
    char line_text[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(text, capacity, "unknown processor");
    while (file && fgets(line_text, sizeof line_text, file)) {
        const char *name = strstr(line_text, ": ");
        if (name && strncmp(line_text, "model name", 10) == 0) {
            snprintf(text, capacity, "%.*s", (int)strcspn(name + 2, "\n"), name + 2);
            break;
        }
    }
    if (file)
        fclose(file);
}

double bench_load(void)
{
    double load = 0;
    FILE *file = fopen("/proc/loadavg", "r");
    if (file && fscanf(file, "%lf", &load) != 1)
        load = 0;
    if (file)
        fclose(file);
    return load;
}
