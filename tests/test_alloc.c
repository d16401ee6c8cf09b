/*
 * No call allocates: the allocator and pthread_create are interposed here and counted over many steps, in all
 * threads. Only what the header names may allocate: creating contexts, planning, warming up.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "support.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

static atomic_bool counting;
static atomic_int calls;

#if !TEST_SANITIZED /* sanitizers interpose these themselves */

#pragma GCC visibility push(default) /* for the library to find them */

static void count_call(void)
{
    if (atomic_load(&counting))
        atomic_fetch_add(&calls, 1);
}

/* dlsym may allocate while it looks for malloc: from here, never to be freed. */
static _Alignas(64) char early[1 << 16];
static size_t early_used;

static void *early_bytes(size_t bytes)
{
    void *start = early + early_used;
    early_used += (bytes + 63) / 64 * 64;
    if (early_used > sizeof early)
        abort();
    return start;
}

static bool is_early(const void *p)
{
    return (const char *)p >= early && (const char *)p < early + sizeof early;
}

/* The next function of that name; NULL while it is being looked for. */
#define NEXT(function)                                 \
    static __typeof__(&function) next;                 \
    static bool looking;                               \
    if (!next && !looking) {                           \
        looking = true;                                \
        *(void **)&next = dlsym(RTLD_NEXT, #function); \
        looking = false;                               \
    }                                                  \
    count_call()

void *malloc(size_t bytes)
{
    NEXT(malloc);
    return next ? next(bytes) : early_bytes(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    NEXT(calloc);
    return next ? next(count, bytes) : early_bytes(count * bytes);
}

void *realloc(void *p, size_t bytes)
{
    NEXT(realloc);
    if (!is_early(p))
        return next(p, bytes);
    void *moved = malloc(bytes);
    memcpy(moved, p, bytes < (size_t)(early + sizeof early - (char *)p) ? bytes : 0);
    return moved;
}

void free(void *p)
{
    NEXT(free);
    if (!is_early(p))
        next(p);
}

int posix_memalign(void **p, size_t alignment, size_t bytes)
{
    NEXT(posix_memalign);
    return next(p, alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    NEXT(aligned_alloc);
    return next(alignment, bytes);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    NEXT(mmap);
    return next(address, bytes, protection, flags, file, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    NEXT(pthread_create);
    return next(thread, attributes, start, argument);
}

#pragma GCC visibility pop

#endif

/* ---- Steps -------------------------------------------------------------------------------------- */

static void add_query_start(world *w)
{
    w->step.query_start = arena_tensor(&w->memory, "query_start", NULL, CSA_I32, 1, w->shape.requests + 1);
    for (int64_t q = 0; q <= w->shape.requests; q++)
        tensor_put(&w->step.query_start, (double)(q * w->shape.query_len), q, 0, 0, 0);
}

static csa_plan *plan_of(const csa_context *context, const world *w)
{
    csa_plan *plan = NULL;
    csa_plan_args args = {.size = sizeof args,
                          .tokens = w->tokens,
                          .requests = w->shape.requests,
                          .regions = w->regions,
                          .groups = w->shape.groups,
                          .topk = w->shape.topk};
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    return plan;
}

/* Statuses are added up while counting: a check's message could allocate. */
static int run_steps(const csa_context *context, world *worlds, csa_plan **plans)
{
    int failures = 0;
    for (int i = 0; i < 100; i++) {
        world *w = &worlds[i % 3];
        csa_step_args step = world_step(w);
        csa_layer_args layer = world_layer(w);
        failures += csa_decode(context, &step) != CSA_OK;
        failures += csa_layer(context, NULL, &layer) != CSA_OK;
        failures += csa_prefill(context, plans[i % 3], &step) != CSA_OK;
        failures += csa_layer(context, plans[i % 3], &layer) != CSA_OK;
        step.topk = -1; /* nor does a refusal */
        failures += csa_decode(context, &step) != CSA_ERROR_UNSUPPORTED;
    }
    return failures;
}

/* Steps of different sizes follow one another, with fewer tokens than threads among them. */
static void expect_no_allocation(csa_context_options options)
{
    csa_context *context = test_context(options);
    world worlds[3];
    csa_plan *plans[3];
    for (int i = 0; i < 3; i++) {
        world_make(&worlds[i], (world_shape){.requests = 1 + 4 * i, .groups = 1 + i, .query_len = 1 + i},
                   (uint64_t)i);
        add_query_start(&worlds[i]);
        plans[i] = plan_of(context, &worlds[i]);
        csa_serving serving = world_serving(&worlds[i]);
        CHECK_OK(csa_warm_up(context, &serving, worlds[i].workspace));
    }
    atomic_store(&calls, 0);
    atomic_store(&counting, true);
    int failures = run_steps(context, worlds, plans);
    atomic_store(&counting, false);
    CHECKF(failures == 0, "%d calls failed: %s", failures, test_error());
    CHECKF(atomic_load(&calls) == 0, "%d allocations in 500 calls on %d threads", atomic_load(&calls),
           (int)options.threads);
    for (int i = 0; i < 3; i++) {
        csa_plan_destroy(plans[i]);
        world_end(&worlds[i]);
    }
    csa_context_destroy(context);
}

static void skip_under_sanitizers(void)
{
    if (!TEST_SANITIZED)
        return;
    print_message("skipped: sanitizers have an allocator of their own\n");
    skip();
}

static void steps_allocate_nothing_with_openmp(void **state)
{
    (void)state;
    skip_under_sanitizers();
    expect_no_allocation((csa_context_options){.threads = 1});
    expect_no_allocation((csa_context_options){.threads = 2});
    expect_no_allocation((csa_context_options){.threads = 6});
    expect_no_allocation((csa_context_options){.threads = 3, .check = true, .scratch_limit = 1});
}

static void steps_allocate_nothing_with_a_pool(void **state)
{
    (void)state;
    skip_under_sanitizers();
    expect_no_allocation((csa_context_options){.threads = 2, .parallel_for = pool_for});
    expect_no_allocation((csa_context_options){.threads = 7, .parallel_for = pool_for});
}

/* The count is worth something. */
static void allocations_are_seen(void **state)
{
    (void)state;
    skip_under_sanitizers();
    atomic_store(&calls, 0);
    atomic_store(&counting, true);
    csa_context *context = test_context((csa_context_options){.threads = 1});
    csa_context_destroy(context);
    atomic_store(&counting, false);
    CHECK(atomic_load(&calls) >= 2);
}

int main(void)
{
    test_needs_host("the mirror in front of its calls allocates");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allocations_are_seen),
        cmocka_unit_test(steps_allocate_nothing_with_openmp),
        cmocka_unit_test(steps_allocate_nothing_with_a_pool),
    };
    test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
