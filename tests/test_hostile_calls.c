/*
 * Calls beside and after one another: requests of very different length in one call, outputs that are a slice
 * of something larger, scratch that is exactly large enough, threads that run steps at once, scratch and plans
 * that are used again for other shapes. SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

#include <pthread.h>

static int64_t *i64_at(const csa_tensor *t, int64_t i)
{
    return tensor_at(t, i, 0, 0, 0);
}

/* ---- Several requests (flash-attention, vllm fork, PR 176, 190) --------------------------------- */

/* Four tokens of one request of three, as a call of its own. */
static void one_request(const world *w, int64_t request, csa_tokens *tokens, csa_step_args *step)
{
    tokens->slots = tensor_slice(w->step.slots, request * 4, 4);
    tokens->positions = tensor_slice(w->step.positions, request * 4, 4);
    tokens->block_table = tensor_slice(w->step.block_table, request, 1);
    tokens->ring_base = tensor_slice(w->step.ring_base, request, 1);
    csa_tensor *all[] = {&step->index_query, &step->index_weights, &step->query,
                         &step->gate,        &step->out,           &step->lse};
    for (int i = 0; i < COUNT_OF(all); i++)
        *all[i] = tensor_slice(*all[i], request * 4, 4);
    step->selected = tensor_slice(step->selected, request * 4, 4);
    step->tokens = tokens;
    step->rows_out = NULL;
}

static void test_requests_apart(void **state)
{
    (void)state;
    const int64_t contexts[] = {9, 900, 9000};
    world w;
    world_make(&w, (world_shape){.requests = 3, .query_len = 4, .heads = 12, .exact_length = 9000, .topk = 20},
               9000);
    for (int64_t t = 0; t < 12; t++) {
        *i64_at(&w.step.positions, t) = contexts[t / 4] - 4 + t % 4;
        *i64_at(&w.step.slots, t) = world_slot(&w, t / 4, contexts[t / 4] - 4 + t % 4);
    }
    csa_tensor alone = copy_of(&w.memory, &w.out), lists = copy_of(&w.memory, &w.selected);
    for (int64_t request = 0; request < 3; request++) {
        csa_step_args step = world_step(&w);
        csa_tokens tokens = w.step;
        step.out = alone;
        step.selected = lists;
        one_request(&w, request, &tokens, &step);
        CHECK_OK(csa_decode(plain_context(), &step));
    }
    buffer *b = arena_buffer(&w.memory, "larger", sizeof(uint16_t) * 20 * 20 * 200);
    csa_tensor slice = csa_tensor_4d((uint16_t *)b->data + 2 * 4000 + 3 * 200 + 5, CSA_BF16, 12, 1, 12, 192);
    slice.stride[0] = 4000;
    slice.stride[2] = 200;
    buffer_cover(b, &slice); /* all bytes beside it must stay */
    csa_step_args together = world_step(&w);
    together.out = slice;
    CHECK_OK(csa_decode(plain_context(), &together));
    tensor_expect_equal("out", &slice, &alone);
    tensor_expect_equal("selected", &w.selected, &lists);
    world_end(&w);
}

/* ---- Scratch (sglang 35201, vllm 55569) --------------------------------------------------------- */

enum { LONG = 800000, WIDE = 128, LONG_REGIONS = LONG / 8, LONG_TOPK = 16 };

/* Four rows at 800,000 tokens, whose blocks are a few that come again and again. */
static void make_long(world *w)
{
    world_make(w, (world_shape){.requests = 4, .exact_length = 500, .block_size = WIDE, .index_heads = 1},
               9100);
    w->shape.topk = LONG_TOPK;
    w->regions = LONG_REGIONS;
    w->step.block_table = arena_tensor(&w->memory, "long table", NULL, CSA_I32, 2, 4, LONG / WIDE);
    for (int64_t row = 0; row < 4; row++) {
        for (int32_t column = 0; column < LONG / WIDE; column++)
            *(int32_t *)tensor_at(&w->step.block_table, row, column, 0, 0) = column % (int32_t)w->blocks;
        *i64_at(&w->step.positions, row) = LONG - 1 - row;
        tensor_put(&w->index_weights, 1.5, row, 0, 0, 0); /* below 0 the best would be many zeros */
    }
    w->selected = arena_tensor(&w->memory, "long list", NULL, CSA_I64, 2, 4, LONG_TOPK + 1);
}

/* The best of the regions of all blocks, and its first sixteen copies. */
static void expect_long_lists(world *w)
{
    csa_score_args score = world_score(w);
    int64_t period = w->blocks * WIDE / 8;
    score.scores = arena_tensor(&w->memory, "one period", NULL, CSA_F32, 2, 4, (int)period);
    score.rows_out = NULL;
    CHECK_OK(csa_score(plain_context(), &score));
    expect_scores(&score);
    for (int64_t row = 0; row < 4; row++) {
        int64_t best = 0;
        for (int64_t i = 1; i < period; i++)
            if (tensor_value(&score.scores, row, i, 0, 0) > tensor_value(&score.scores, row, best, 0, 0))
                best = i;
        for (int64_t i = 0; i <= LONG_TOPK; i++)
            CHECK(*(int64_t *)tensor_at(&w->selected, row, i, 0, 0) ==
                  (i < LONG_TOPK ? best + i * period : LONG_REGIONS - 1));
    }
}

static void set_workspace(world *w, size_t bytes)
{
    buffer *b = arena_buffer(&w->memory, "exact workspace", bytes);
    csa_tensor all = csa_tensor_1d(b->data, CSA_U8, (int64_t)bytes);
    buffer_cover(b, &all);
    w->workspace = (csa_workspace){b->data, bytes};
}

/* limit: of the scratch, 0 for the default. Prefill under a plan has the same need. */
static void run_long(size_t limit, bool prefill)
{
    world w;
    make_long(&w);
    csa_context_options options = test_options((csa_context_options){.threads = 2, .scratch_limit = limit});
    csa_context *context = test_context(options);
    csa_serving serving = world_serving(&w);
    csa_plan_args args = {.size = sizeof args, .tokens = 4, .requests = 4, .regions = LONG_REGIONS, .topk = 16};
    csa_plan *plan = NULL;
    args.invariant = true;
    serving.decode_tokens = prefill ? 0 : 4;
    serving.prefill_tokens = prefill ? 4 : 0;
    size_t bytes;
    CHECK_OK(csa_workspace_size(&options, &serving, &bytes));
    CHECK(bytes <= (limit > 0 ? limit : (size_t)128 << 20));
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    set_workspace(&w, bytes);
    csa_step_args step = world_step(&w);
    uint8_t *before = arena_snapshot(&w.memory);
    step.workspace.bytes--; /* one byte less: an error before anything is written */
    csa_status status = prefill ? csa_prefill(context, plan, &step) : csa_decode(context, &step);
    expect_refused(status, CSA_ERROR_WORKSPACE, "workspace has", NULL);
    CHECK(arena_unchanged(&w.memory, before));
    free(before);
    step.workspace.bytes++;
    CHECK_OK(prefill ? csa_prefill(context, plan, &step) : csa_decode(context, &step));
    expect_long_lists(&w);
    csa_attend_args attend = world_attend(&w);
    expect_attended(&attend);
    csa_plan_destroy(plan);
    csa_context_destroy(context);
    world_end(&w);
}

static void test_exact_scratch(void **state)
{
    (void)state;
    run_long(0, false);
    run_long(900000, true); /* two rows at a time */
}

/* However many rows and however long, within the bound, if one token's own scratch is. */
static void test_bounded_scratch(void **state)
{
    (void)state;
    const int64_t regions[] = {1, 512, 513, 100000, 3000000};
    const int64_t tokens[] = {1, 4096, 100000, INT32_MAX};
    for (int i = 0; i < COUNT_OF(regions); i++)
        for (int j = 0; j < COUNT_OF(tokens); j++) {
            csa_serving s = {.size = sizeof s, .regions = regions[i], .decode_tokens = tokens[j], .groups = 8};
            size_t decode, both;
            CHECK_OK(csa_workspace_size(NULL, &s, &decode));
            s.prefill_tokens = tokens[j];
            CHECK_OK(csa_workspace_size(NULL, &s, &both));
            CHECK(decode <= (size_t)128 << 20 && both >= decode && both <= (size_t)128 << 20);
        }
}

/* One scratch for steps of other shapes, full of whatever the last one left: as if it were clean. */
static void test_reused_scratch(void **state)
{
    (void)state;
    const world_shape shapes[] = {
        {.requests = 3, .groups = 2, .max_length = 300, .topk = 5},
        {.requests = 1, .heads = 16, .exact_length = 10, .topk = 40},
        {.requests = 6, .query_len = 3, .groups = 3, .max_length = 500, .topk = 1},
    };
    csa_workspace scratch = {NULL, 1 << 20};
    scratch.data = aligned_alloc(256, scratch.bytes);
    CHECK(scratch.data != NULL);
    memset(scratch.data, 0, scratch.bytes);
    for (int i = 0; i < 9; i++) {
        world clean, used;
        world_make(&clean, shapes[i % 3], 9200 + (uint64_t)i);
        world_make(&used, shapes[i % 3], 9200 + (uint64_t)i);
        used.workspace = scratch;
        csa_step_args a = world_step(&clean), b = world_step(&used);
        CHECK_OK(csa_decode(plain_context(), &a));
        CHECK_OK(csa_decode(plain_context(), &b));
        tensor_expect_equal("out", &used.out, &clean.out);
        tensor_expect_equal("selected", &used.selected, &clean.selected);
        world_end(&clean);
        world_end(&used);
    }
    free(scratch.data);
}

/* One token at a time, or a few: the same bits as all at once. */
static void test_chunks(void **state)
{
    (void)state;
    const size_t limits[] = {1, 1500, 3000};
    for (int i = 0; i < 3; i++)
        for (int prefill = 0; prefill < 2; prefill++) {
            world all, cut;
            world_shape shape = {
                .requests = 5, .query_len = 3, .groups = 2, .max_length = 200, .inactive = true};
            world_make(&all, shape, 9250);
            world_make(&cut, shape, 9250);
            csa_context *context =
                test_context((csa_context_options){.threads = 3, .scratch_limit = limits[i]});
            csa_plan_args args = {
                .size = sizeof args, .tokens = cut.tokens, .requests = 5, .regions = cut.regions};
            csa_plan *plan = NULL;
            args.groups = 2;
            args.invariant = true;
            args.topk = cut.shape.topk;
            args.positions = i ? cut.step.positions.data : NULL;
            CHECK_OK(csa_plan_prefill(context, &args, &plan));
            csa_step_args a = world_step(&all), b = world_step(&cut);
            CHECK_OK(csa_decode(plain_context(), &a));
            CHECK_OK(prefill ? csa_prefill(context, plan, &b) : csa_decode(context, &b));
            tensor_expect_equal("out", &cut.out, &all.out);
            tensor_expect_equal("lse", &cut.lse, &all.lse);
            tensor_expect_equal("selected", &cut.selected, &all.selected);
            tensor_expect_equal("current", &cut.rows_out.current, &all.rows_out.current);
            csa_plan_destroy(plan);
            csa_context_destroy(context);
            world_end(&all);
            world_end(&cut);
        }
}

/* mini-sglang PR 103, flashinfer PR 564: a plan that is made anew for another shape; and many live ones. */
static void test_reused_plans(void **state)
{
    (void)state;
    csa_plan *again = NULL;
    for (int i = 0; i < 6; i++) {
        world a, b;
        world_shape shape = {.requests = 1 + i % 3 * 4, .query_len = 7 - i, .max_length = 40 + 60 * (i % 2)};
        world_make(&a, shape, 9300 + (uint64_t)i);
        world_make(&b, shape, 9300 + (uint64_t)i);
        csa_plan *fresh = NULL;
        csa_plan_args args = {.size = sizeof args, .tokens = a.tokens, .requests = shape.requests};
        args.regions = a.regions;
        args.topk = a.shape.topk;
        args.invariant = true;
        args.positions = a.step.positions.data;
        CHECK_OK(csa_plan_prefill(plain_context(), &args, &fresh));
        CHECK_OK(csa_plan_prefill(plain_context(), &args, &again));
        csa_step_args x = world_step(&a), y = world_step(&b);
        CHECK_OK(csa_prefill(plain_context(), fresh, &x));
        csa_plan_destroy(fresh);
        CHECK_OK(csa_prefill(plain_context(), again, &y));
        tensor_expect_equal("out", &b.out, &a.out);
        expect_step(plain_context(), &y);
        world_end(&a);
        world_end(&b);
    }
    csa_plan_destroy(again);
}

/* ---- Threads (flashinfer 3618) ------------------------------------------------------------------ */

/* A host thread with 100 steps of its own; nothing is checked on it. */
typedef struct runner {
    const csa_context *context;
    world w;
    csa_tensor expected;
    int different, failed;
} runner;

static void *run_steps(void *argument)
{
    runner *r = argument;
    csa_step_args step = world_step(&r->w);
    for (int i = 0; i < 100; i++) {
        tensor_set(&r->w.out, 0xFF);
        r->failed += csa_decode(r->context, &step) != CSA_OK;
        r->different += !tensor_equal(&r->w.out, &r->expected);
    }
    return NULL;
}

static void run_two(const csa_context *first, const csa_context *second)
{
    runner runners[2] = {{.context = first}, {.context = second}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        world_make(&runners[i].w, (world_shape){.requests = 3 + i, .max_length = 60}, 9400 + (uint64_t)i);
        csa_step_args step = world_step(&runners[i].w);
        CHECK_OK(csa_decode(serial_context(), &step));
        runners[i].expected = copy_of(&runners[i].w.memory, &runners[i].w.out);
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, run_steps, &runners[i]) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(runners[i].failed == 0 && runners[i].different == 0);
        world_end(&runners[i].w);
    }
}

static void test_two_threads(void **state)
{
    (void)state;
    csa_context *one = test_context((csa_context_options){.threads = 3, .parallel_for = pool_for});
    csa_context *other = test_context((csa_context_options){.threads = 2, .parallel_for = pool_for});
    run_two(one, one);
    run_two(one, other);
    run_two(plain_context(), plain_context()); /* OpenMP may be entered twice, too */
    csa_context_destroy(one);
    csa_context_destroy(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests_apart),  cmocka_unit_test(test_exact_scratch),
        cmocka_unit_test(test_bounded_scratch), cmocka_unit_test(test_reused_scratch),
        cmocka_unit_test(test_reused_plans),    cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_two_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
