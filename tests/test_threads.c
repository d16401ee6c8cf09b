/*
 * Threads: any number of host threads may share a context, tasks may run in any order and anywhere, and none
 * may be left out. Meant for ThreadSanitizer. SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include <pthread.h>

enum { HOSTS = 4, ROUNDS = TEST_SANITIZED ? 12 : 50 };

/* ---- Several host threads ----------------------------------------------------------------------- */

/* One host thread's world, and what its steps must give. */
typedef struct host {
    pthread_t thread;
    csa_context *context;
    world w;
    csa_plan *plan;
    csa_tensor expected_out, expected_selected;
    csa_tensor out, selected;
    int wrong, failed;
} host;

static void make_host(host *h, csa_context *context, uint64_t number)
{
    memset(h, 0, sizeof *h);
    h->context = context;
    world_shape shape = {
        .groups = 2, .heads = 2, .requests = 2 + (int32_t)number, .query_len = 2, .max_length = 60};
    shape.strided = number % 2;
    world_make(&h->w, shape, number);
    csa_plan_args args = {.size = sizeof args,
                          .tokens = h->w.tokens,
                          .requests = shape.requests,
                          .regions = h->w.regions,
                          .groups = 2,
                          .topk = h->w.shape.topk,
                          .invariant = true};
    CHECK_OK(csa_plan_prefill(context, &args, &h->plan));
    csa_context *serial = test_context((csa_context_options){.threads = 1});
    csa_step_args step = world_step(&h->w);
    CHECK_OK(csa_decode(serial, &step));
    csa_context_destroy(serial);
    h->expected_out = h->w.out;
    h->expected_selected = h->w.selected;
    h->out = arena_tensor(&h->w.memory, "own out", NULL, CSA_BF16, 4, (int)h->w.tokens, 2, 2, CSA_HEAD_SIZE);
    h->selected = arena_tensor(&h->w.memory, "own selected", NULL, CSA_I64, 2, (int)h->w.rows,
                               (int)h->w.selected.shape[1]);
}

static void *run_host(void *argument)
{
    host *h = argument;
    for (int round = 0; round < ROUNDS; round++) {
        csa_step_args step = world_step(&h->w);
        step.out = h->out;
        step.selected = h->selected;
        tensor_set(&h->out, 0xFF);
        csa_status status = round % 2 ? csa_prefill(h->context, h->plan, &step) : csa_decode(h->context, &step);
        h->failed += status != CSA_OK;
        h->wrong +=
            !tensor_equal(&h->out, &h->expected_out) || !tensor_equal(&h->selected, &h->expected_selected);
        step.topk = -1; /* a text of this thread's own */
        step.scale = (float)round;
        h->wrong +=
            csa_decode(h->context, &step) != CSA_ERROR_UNSUPPORTED || !strstr(test_error(), "topk is -1");
    }
    return NULL;
}

static void run_hosts(csa_context **contexts)
{
    host hosts[HOSTS];
    for (int i = 0; i < HOSTS; i++) {
        test_set_draw(i);
        make_host(&hosts[i], contexts[i], (uint64_t)i);
    }
    for (int i = 0; i < HOSTS; i++)
        CHECK(pthread_create(&hosts[i].thread, NULL, run_host, &hosts[i]) == 0);
    for (int i = 0; i < HOSTS; i++)
        pthread_join(hosts[i].thread, NULL);
    for (int i = 0; i < HOSTS; i++) {
        CHECKF(hosts[i].failed == 0 && hosts[i].wrong == 0, "host %d: %d calls failed, %d results differ", i,
               hosts[i].failed, hosts[i].wrong);
        csa_plan_destroy(hosts[i].plan);
        world_end(&hosts[i].w);
    }
}

static void hosts_share_a_context(void **state)
{
    (void)state;
    const csa_context_options kinds[] = {{.threads = 3},
                                         {.threads = 3, .parallel_for = pool_for},
                                         {.threads = 3, .parallel_for = pool_for, .scratch_limit = 1}};
    for (int kind = 0; kind < 3; kind++) {
        csa_context *context = test_context(kinds[kind]), *contexts[HOSTS];
        for (int i = 0; i < HOSTS; i++)
            contexts[i] = context;
        run_hosts(contexts);
        csa_context_destroy(context);
    }
}

static void hosts_have_contexts(void **state)
{
    (void)state;
    csa_context *contexts[HOSTS];
    for (int i = 0; i < HOSTS; i++)
        contexts[i] = test_context((csa_context_options){.threads = 1 + i});
    run_hosts(contexts);
    for (int i = 0; i < HOSTS; i++)
        csa_context_destroy(contexts[i]);
}

/* ---- Pools of all kinds ------------------------------------------------------------------------- */

static void expect_same_layer(csa_context_options options)
{
    for (uint64_t number = 0; number < 6; number++) {
        test_set_draw((int64_t)number);
        world_shape shape = {
            .groups = 2, .requests = 1 + (int32_t)number * 2, .query_len = 1 + (int32_t)number % 3};
        shape.inactive = number % 2;
        world w, twin;
        world_make(&w, shape, number);
        world_make(&twin, shape, number);
        csa_layer_args layer = world_layer(&w), alone = world_layer(&twin);
        csa_context *context = test_context(options),
                    *serial = test_context((csa_context_options){.threads = 1});
        CHECK(csa_context_threads(context) == options.threads);
        CHECK_OK(csa_layer(context, NULL, &layer));
        CHECK_OK(csa_layer(serial, NULL, &alone));
        arena_expect_equal(&w.memory, &twin.memory, NULL);
        csa_context_destroy(context);
        csa_context_destroy(serial);
        world_end(&w);
        world_end(&twin);
    }
}

static void tasks_run_in_any_order_anywhere(void **state)
{
    (void)state;
    test_skip_on_cuda("no task runs on the host");
    const csa_parallel_for kinds[] = {serial_for, reverse_for, foreign_for, pool_for};
    const int32_t threads[] = {1, 2, 7, 64};
    for (int kind = 0; kind < 4; kind++)
        for (int t = 0; t < (kind == 2 ? 3 : 4); t++)
            expect_same_layer((csa_context_options){.threads = threads[t], .parallel_for = kinds[kind]});
}

/* What parallel_for was asked. */
typedef struct asked {
    int32_t most, calls;
    int32_t drop; /* tasks to leave out */
} asked;

static void asking_for(void *pool, int32_t count, csa_task task, void *task_data)
{
    asked *a = pool;
    a->calls++;
    a->most = count > a->most ? count : a->most;
    for (int32_t i = a->drop; i < count; i++)
        task(task_data, i);
}

static void counts_stay_within_threads(void **state)
{
    (void)state;
    test_skip_on_cuda("no task runs on the host");
    asked a = {0};
    csa_context *context =
        test_context((csa_context_options){.threads = 5, .parallel_for = asking_for, .pool = &a});
    world w;
    world_make(&w, (world_shape){.requests = 9, .groups = 3}, 1);
    csa_layer_args layer = world_layer(&w);
    CHECK_OK(csa_layer(context, NULL, &layer));
    CHECK(a.calls > 0 && a.most == 5);
    csa_context_destroy(context);
    world_end(&w);
}

/* How often a layer step of so many requests asks for threads, and how often csa_decode alone. */
static void count_calls(int32_t requests, int32_t *layer_calls, int32_t *step_calls)
{
    asked a = {0};
    csa_context *context =
        test_context((csa_context_options){.threads = 2, .parallel_for = asking_for, .pool = &a});
    world w;
    world_make(&w, (world_shape){.requests = requests}, 1);
    csa_layer_args layer = world_layer(&w);
    csa_step_args step = world_step(&w);
    CHECK_OK(csa_layer(context, NULL, &layer)); /* the workspace is warm from here on */
    a.calls = 0;
    CHECK_OK(csa_layer(context, NULL, &layer));
    *layer_calls = a.calls;
    CHECK_OK(csa_decode(context, &step));
    *step_calls = a.calls - *layer_calls;
    csa_context_destroy(context);
    world_end(&w);
}

/* A few tokens are prepared and summarised by the caller alone, many by a single call of parallel_for. */
static void small_loops_wake_nobody(void **state)
{
    (void)state;
    csa_context *context = test_context((csa_context_options){.threads = 2});
    bool cpu = csa_context_backend(context) == CSA_BACKEND_CPU;
    csa_context_destroy(context);
    if (!cpu)
        skip();
    int32_t layer, step;
    count_calls(2, &layer, &step);
    CHECKF(layer == step, "%d calls, %d in the step", (int)layer, (int)step);
    count_calls(100, &layer, &step);
    CHECKF(layer == step + 1, "%d calls, %d in the step", (int)layer, (int)step);
}

static void a_dropped_task_is_noticed(void **state)
{
    (void)state;
    test_skip_on_cuda("no task runs on the host");
    asked a = {.drop = 1};
    csa_context *context =
        test_context((csa_context_options){.threads = 3, .parallel_for = asking_for, .pool = &a});
    csa_context *good = test_context((csa_context_options){.threads = 3, .parallel_for = serial_for});
    world w;
    world_make(&w, (world_shape){.requests = 60, .groups = 2, .query_len = 1}, 1); /* enough for three tasks */
    csa_summarize_args summarize = world_summarize(&w);
    csa_score_args score = world_score(&w);
    csa_select_args select = world_select(&w);
    csa_attend_args attend = world_attend(&w);
    csa_step_args step = world_step(&w);
    csa_layer_args layer = world_layer(&w);
    CHECK(csa_prepare(context, &w.prepare) == CSA_ERROR_INTERNAL);
    CHECKF(strstr(test_error(), "2 tasks of 3"), "%s", test_error());
    CHECK_OK(csa_prepare(good, &w.prepare));
    CHECK(csa_summarize_decode(context, &summarize) == CSA_ERROR_INTERNAL);
    CHECK(csa_score(context, &score) == CSA_ERROR_INTERNAL);
    CHECK_OK(csa_score(good, &score));
    CHECK(csa_select(context, &select) == CSA_ERROR_INTERNAL);
    CHECK_OK(csa_select(good, &select));
    CHECK(csa_attend(context, &attend) == CSA_ERROR_INTERNAL);
    CHECK(csa_decode(context, &step) == CSA_ERROR_INTERNAL);
    CHECK(csa_layer(context, NULL, &layer) == CSA_ERROR_INTERNAL);
    a.drop = 0; /* the context is none the worse for it */
    CHECK_OK(csa_layer(context, NULL, &layer));
    csa_context_destroy(context);
    csa_context_destroy(good);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hosts_share_a_context),           cmocka_unit_test(hosts_have_contexts),
        cmocka_unit_test(tasks_run_in_any_order_anywhere), cmocka_unit_test(counts_stay_within_threads),
        cmocka_unit_test(small_loops_wake_nobody),         cmocka_unit_test(a_dropped_task_is_noticed),
    };
    test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
