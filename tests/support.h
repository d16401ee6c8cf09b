/*
 * What the unit tests share: seeded random numbers, guarded memory, tensor views, number formats written anew
 * (nothing here comes from src/), threads to inject, contexts, and `world`, a random paged cache with a step on
 * it. Every check that fails prints the seed and the draw, and `CSA_TEST_SEED=<seed>` repeats the run.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_SUPPORT_H
#define CSA_TEST_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <csa/csa.h>

/* ---- Sanitizers --------------------------------------------------------------------------------- */

#ifdef __has_feature
#define TEST_HAS_FEATURE(x) __has_feature(x)
#else
#define TEST_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || TEST_HAS_FEATURE(thread_sanitizer)
#define TEST_TSAN 1
#else
#define TEST_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__) || TEST_HAS_FEATURE(address_sanitizer)
#define TEST_ASAN 1
#else
#define TEST_ASAN 0
#endif
#define TEST_SANITIZED (TEST_TSAN || TEST_ASAN || TEST_HAS_FEATURE(undefined_behavior_sanitizer))

#ifdef CSA_TEST_EMULATED /* the processor is emulated */
#define TEST_SLOW 1
#else
#define TEST_SLOW TEST_SANITIZED
#endif

/* Is it one of the slow builds, or does CSA_TEST_QUICK ask for a tenth, as under compute-sanitizer? */
static inline bool test_quick(void)
{
    return TEST_SLOW || getenv("CSA_TEST_QUICK");
}

/* How many of `draws` random cases to try: fewer where they are slow. */
static inline int test_draws(int draws)
{
    int few = draws / 10;
    return !test_quick() ? draws : few > 2 ? few : 2;
}

/* ---- Checks ------------------------------------------------------------------------------------- */

/* On the test's own thread only. CHECKF adds a text: CHECKF(condition, "format", ...). */
#define CHECKF(condition, ...)                                      \
    do {                                                            \
        if (!(condition))                                           \
            test_fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (0)
#define CHECK(condition) CHECKF(condition, "%s", "")
/* The call must succeed; prints csa_last_error if not. */
#define CHECK_OK(call)   test_expect_ok(__FILE__, __LINE__, #call, (call))

__attribute__((format(printf, 4, 5))) void test_fail(const char *file, int line, const char *what,
                                                     const char *format, ...);
void test_expect_ok(const char *file, int line, const char *what, csa_status status);

/* The seed of this run (printed at the first call), and the draw that failures name. */
uint64_t test_seed(void);
void test_set_draw(int64_t draw);

/* The last error text of this thread, in a buffer of this thread. */
const char *test_error(void);

/* ---- Random numbers ----------------------------------------------------------------------------- */

typedef struct test_random {
    uint64_t state;
} test_random;

/* A stream of its own for every (seed of the run, a, b). */
test_random random_of(uint64_t a, uint64_t b);
uint64_t random_bits(test_random *r);
int64_t random_between(test_random *r, int64_t low, int64_t high); /* both included */
bool random_chance(test_random *r, int percent);
double random_unit(test_random *r);   /* [0, 1) */
double random_normal(test_random *r); /* about normal, deviation 1, within +-6 */
void random_shuffle(test_random *r, int32_t *values, int64_t count);
/* One of the arguments. */
#define RANDOM_OF(r, ...) \
    ((int32_t[]){__VA_ARGS__}[random_between(r, 0, (int64_t)(sizeof((int32_t[]){__VA_ARGS__}) / 4) - 1)])

/* ---- Number formats ----------------------------------------------------------------------------- */

float bf16_value(uint16_t code);
uint16_t bf16_code(float x); /* to nearest even; a NaN stays one */
float bf16_rounded(float x);
float e4m3_value(uint8_t code);
uint8_t e4m3_code(float x); /* to nearest even, saturating; a NaN becomes 0x7F */

/* ---- Guarded memory ----------------------------------------------------------------------------- */

/* All memory of a test. A buffer is aligned to 256 bytes, filled with 0xFF (NaN, -1), and lies between guard
 * zones. Its bytes that belong to no tensor must stay 0xFF. */
typedef struct arena {
    struct buffer *first;
} arena;

typedef struct buffer {
    struct buffer *next;
    const char *name;
    uint8_t *data;
    size_t bytes;
    uint8_t *covered; /* per byte: does it belong to a tensor? */
    uint8_t *block;
} buffer;

buffer *arena_buffer(arena *a, const char *name, size_t bytes);
/* Guards and gaps are as they were; fails the test if not. */
void arena_check(const arena *a);
void arena_free(arena *a);
/* Two arenas filled by the same sequence of calls hold the same bytes, but for the workspace and the buffer
 * named `except` (or NULL). */
void arena_expect_equal(const arena *got, const arena *expected, const char *except);
/* A copy of all bytes (free() it), and whether they are the same now. */
uint8_t *arena_snapshot(const arena *a);
bool arena_unchanged(const arena *a, const uint8_t *snapshot);

/* ---- Tensors ------------------------------------------------------------------------------------ */

/* A tensor in a buffer of its own. gaps: NULL for row-major without gaps, else random gaps before it and
 * between its rows (in a vector: between elements). */
csa_tensor arena_tensor(arena *a, const char *name, test_random *gaps, csa_dtype dtype, int ndim, ...);
/* Says that the view's bytes in the buffer are its own, no gap. */
void buffer_cover(buffer *b, const csa_tensor *view);

int64_t tensor_itemsize(csa_dtype dtype);
int64_t tensor_count(const csa_tensor *t);
void *tensor_at(const csa_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l);
/* An element as a number, whatever its dtype. */
double tensor_value(const csa_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l);
void tensor_put(csa_tensor *t, double value, int64_t i, int64_t j, int64_t k, int64_t l);
/* Elements [first, first + count) of the first extent. */
csa_tensor tensor_slice(csa_tensor t, int64_t first, int64_t count);
void tensor_copy(csa_tensor *to, const csa_tensor *from);
/* All bytes of its elements become `byte`. */
void tensor_set(csa_tensor *t, int byte);
/* scale * normal values. */
void tensor_randomise(csa_tensor *t, test_random *r, double scale);
/* The same bits (any NaN equals any NaN); else fails the test and names the first place. */
void tensor_expect_equal(const char *name, const csa_tensor *got, const csa_tensor *expected);
bool tensor_equal(const csa_tensor *a, const csa_tensor *b);

/* ---- Threads and contexts ----------------------------------------------------------------------- */

/* A pool of six threads and the caller, started at the first use; any number of threads may enter at once. The
 * argument is not read. */
void pool_for(void *pool, int32_t count, csa_task task, void *task_data);
void serial_for(void *pool, int32_t count, csa_task task, void *task_data);
void reverse_for(void *pool, int32_t count, csa_task task, void *task_data);
/* Every task on a thread of its own, never on the caller's. */
void foreign_for(void *pool, int32_t count, csa_task task, void *task_data);

/* The options of the context that the test is about: what they leave open is filled in. Without a back end it
 * is what the environment's CSA_TEST_BACKEND names (cuda: of tier CSA_TEST_TIER, if given), or CSA_TEST_TIER:
 * ref, or a tier of cpu; else the default.
 * Exits with 77 if that is not here. Without parallel_for it runs OpenMP, but pool_for under ThreadSanitizer,
 * as OpenMP's runtime is not instrumented. */
csa_context_options test_options(csa_context_options options);
/* Creates a context with them. One that says its back end runs that one: to compare with. */
csa_context *test_context(csa_context_options options);

/* Is it about cuda? What has no meaning there skips itself: a test with test_skip_on_cuda, a whole program with
 * test_needs_host; both say why. */
bool test_on_cuda(void);
void test_needs_host(const char *reason);
#define test_skip_on_cuda(reason)                           \
    do {                                                    \
        if (test_on_cuda()) {                               \
            print_message("skipped on cuda: %s\n", reason); \
            skip();                                         \
        }                                                   \
    } while (0)

/* ---- A world ------------------------------------------------------------------------------------ */

/* Zero means the value in brackets. */
typedef struct world_shape {
    int32_t groups;        /* [1] */
    int32_t heads;         /* query heads per group [1] */
    int32_t index_heads;   /* [4] of the step; 2 or 4 also in prepare, which has 2 otherwise */
    int32_t block_size;    /* [16] */
    int32_t topk;          /* [4] */
    int32_t requests;      /* [1] */
    int32_t query_len;     /* [1] new tokens of each request */
    csa_dtype kv_dtype;    /* [CSA_BF16] */
    int64_t max_length;    /* tokens of a request, the new ones included, are query_len to this [100] */
    int64_t exact_length;  /* all requests have so many */
    int64_t ring_capacity; /* [max(8, 6 + query_len)] */
    int32_t rotary;        /* of the attention rope [64]; -1: none */
    bool strided;          /* gaps everywhere, summaries beside the KV in each block */
    bool inactive;         /* some tokens are padding, with junk in their ids */
} world_shape;

/* A paged cache full of random numbers, in shuffled blocks, and a decode or verify step on it: every request's
 * last query_len tokens are new. Behind the live part a block table holds junk (-1, past the end). */
typedef struct world {
    world_shape shape; /* zeros filled in */
    test_random random;
    arena memory;
    int64_t tokens;  /* requests * query_len */
    int64_t rows;    /* tokens * groups */
    int64_t blocks;  /* in the cache; not all are used */
    int64_t columns; /* of the block table, at least one more than any request needs */
    int64_t regions; /* that the live part of the widest request needs, plus 0 to 3 */
    int64_t *lengths;
    csa_cache cache;
    csa_tokens step; /* slots, positions, ring_base, block_table, query_len */

    /* Inputs of csa_decode and its parts. */
    csa_tensor index_query, index_weights, query, gate;
    float scale;
    /* Outputs: 0xFF so far. */
    csa_tensor scores, selected, out, lse;
    csa_rows rows_out;
    csa_workspace workspace; /* for csa_decode and csa_layer under a default context */

    csa_prepare_args prepare; /* complete, writes the cache; its outputs are its own */
    csa_tensor z;
} world;

void world_make(world *w, world_shape shape, uint64_t number);
/* arena_check, then frees. */
void world_end(world *w);

/* Calls on it, ready to run; outputs are the world's. Pointers lead into the world: it must not move. */
csa_score_args world_score(world *w);
csa_select_args world_select(world *w); /* current comes from rows_out */
csa_attend_args world_attend(world *w);
csa_step_args world_step(world *w);
csa_summarize_args world_summarize(world *w);
csa_layer_args world_layer(world *w);
csa_serving world_serving(const world *w);

/* Where position p of a request lies. */
int64_t world_slot(const world *w, int64_t request, int64_t position);

#endif
