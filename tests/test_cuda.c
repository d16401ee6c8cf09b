/*
 * The cuda back end as an engine uses it: device memory, streams, captured graphs, and (cuda_sizes.c) many
 * rows, large caches. (What its calls compute, all other tests say behind the mirror, docs/TESTING.md.)
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda_twin.h"

#include <pthread.h>

/* ---- Captured graphs ---------------------------------------------------------------------------- */

static cudaGraphExec_t capture(kind k, twin *t)
{
    cudaGraph_t graph;
    cudaGraphExec_t made;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    csa_status status = queue(k, t);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECKF(status == CSA_OK, "%s", test_error());
    CHECK_CUDA(cudaGraphInstantiate(&made, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return made;
}

/* A graph of short requests replays longer ones, with other scales and whatever lies in the workspace, and
 * leaves what the call itself does. */
static void expect_replays(kind k, world_shape shape)
{
    const int percents[] = {10, 100, 45, 3, 100}, left[] = {0x7E, 0xFF, 0xA5, 0xFF, 0x7E};
    twin t[2]; /* one replays, the other calls */
    for (int i = 0; i < 2; i++) {
        make_twin(&t[i], shape, 71);
        if (k == PLANNED_LAYER)
            add_plan(&t[i]);
    }
    set_lengths(&t[0].host, 10);
    to_device(&t[0]);
    cudaGraphExec_t graph = capture(k, &t[0]);
    for (int draw = 0; draw < 5; draw++) {
        test_set_draw(draw);
        for (int i = 0; i < 2; i++) {
            set_lengths(&t[i].host, percents[draw]);
            set_scales(&t[i].host, 0.5F + 0.25F * (float)draw, 1.25F - 0.125F * (float)draw);
            to_device(&t[i]);
        }
        spoil_workspace(&t[0], left[draw]); /* as floats: large, NaN or about 0 */
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
        CHECK_OK(queue(k, &t[1]));
        to_host(&t[0]);
        to_host(&t[1]);
        arena_expect_equal(&t[0].host.memory, &t[1].host.memory, NULL);
    }
    CHECK_CUDA(cudaGraphExecDestroy(graph));
    end_twin(&t[0]);
    end_twin(&t[1]);
}

static void graphs_replay_other_lengths(void **state)
{
    (void)state;
    world_shape shape = {.requests = 5, .groups = 2, .heads = 8, .exact_length = 1500, .topk = 70};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        shape.query_len = 1;
        expect_replays(DECODE, shape);
        expect_replays(LAYER, shape);
        shape.query_len = 3;
        expect_replays(LAYER, shape);
        expect_replays(PLANNED_LAYER, shape);
    }
}

/* ---- The same bits ------------------------------------------------------------------------------ */

static void steps_repeat_themselves(void **state)
{
    (void)state;
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = 4, .groups = 2, .heads = 16, .exact_length = 900, .topk = 100};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin t;
        make_twin(&t, shape, 72);
        uint8_t *first = NULL;
        for (int i = 0; i < 6; i++) {
            to_device(&t);
            spoil_workspace(&t, 51 * i);
            CHECK_OK(queue(DECODE, &t));
            to_host(&t);
            if (!first)
                first = arena_snapshot(&t.host.memory);
            CHECKF(arena_unchanged(&t.host.memory, first), "run %d differs from the first", i);
        }
        free(first);
        end_twin(&t);
    }
}

/* What a decode row gives: its outputs, one behind the other. */
typedef struct row_bits {
    uint8_t bytes[16384];
    size_t count;
} row_bits;

static void add_bits(row_bits *bits, const csa_tensor *t, int64_t token, int64_t rows)
{
    csa_tensor row = tensor_slice(*t, token * rows, rows);
    size_t bytes = (size_t)(tensor_count(&row) * tensor_itemsize(row.dtype));
    CHECK(bits->count + bytes <= sizeof bits->bytes);
    CHECK_CUDA(cudaMemcpy(bits->bytes + bits->count, row.data, bytes, cudaMemcpyDeviceToHost));
    bits->count += bytes;
}

/* Decodes requests [first, first + count) alone; the bits of request `of`. */
static row_bits decode_part(const twin *t, int64_t first, int64_t count, int64_t of)
{
    csa_step_args step = world_step((world *)&t->device);
    csa_tokens tokens = t->device.step;
    csa_tensor *by_token[] = {
        &tokens.block_table, &tokens.slots, &tokens.positions, &tokens.ring_base, &step.index_query,
        &step.index_weights, &step.query,   &step.gate,        &step.out,         &step.lse};
    for (size_t i = 0; i < sizeof by_token / sizeof *by_token; i++)
        *by_token[i] = tensor_slice(*by_token[i], first, count);
    int64_t groups = t->host.shape.groups;
    step.selected = tensor_slice(step.selected, first * groups, count * groups);
    step.tokens = &tokens;
    step.rows_out = NULL;
    step.stream = stream;
    CHECK_OK(csa_decode(context, &step));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    row_bits bits = {.count = 0};
    add_bits(&bits, &t->device.out, of, 1);
    add_bits(&bits, &t->device.lse, of, 1);
    add_bits(&bits, &t->device.selected, of, groups);
    return bits;
}

static void batch_mates_change_nothing(void **state)
{
    (void)state;
    const int64_t batches[] = {9, 65, 129};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = test_quick() ? 9 : 129, .heads = 8, .exact_length = 1100, .topk = 96};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin t;
        make_twin(&t, shape, 73);
        for (int64_t of = 0; of < 9; of += 4) {
            row_bits alone = decode_part(&t, of, 1, of);
            for (int i = 0; i < 3 && batches[i] <= shape.requests; i++) {
                row_bits among = decode_part(&t, 0, batches[i], of);
                CHECKF(memcmp(&alone, &among, sizeof alone) == 0, "row %d in a batch of %d", (int)of,
                       (int)batches[i]);
            }
        }
        end_twin(&t);
    }
}

/* Attention of the first tokens, with a workspace of so many bytes. */
static void expect_attended_alike(const twin *t, int64_t tokens, size_t bytes)
{
    csa_attend_args attend = world_attend((world *)&t->device);
    csa_tensor *by_token[] = {&attend.query, &attend.gate};
    for (int i = 0; i < 2; i++)
        *by_token[i] = tensor_slice(*by_token[i], 0, tokens);
    csa_tokens step = t->device.step;
    csa_tensor *of_step[] = {&step.block_table, &step.slots, &step.positions, &step.ring_base};
    for (int i = 0; i < 4; i++)
        *of_step[i] = tensor_slice(*of_step[i], 0, tokens);
    csa_tensor out = tensor_slice(attend.out, 0, tokens), lse = tensor_slice(attend.lse, 0, tokens);
    size_t out_bytes = (size_t)tensor_count(&out) * 2, lse_bytes = (size_t)tensor_count(&lse) * 4;
    attend.selected = tensor_slice(attend.selected, 0, tokens * t->host.shape.groups);
    attend.tokens = &step;
    attend.stream = stream;
    attend.workspace = (csa_workspace){bytes ? allocate(bytes) : NULL, bytes};
    attend.out = out, attend.lse = lse;
    attend.out.data = allocate(out_bytes);
    attend.lse.data = allocate(lse_bytes);
    CHECK_OK(csa_attend(context, &attend));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    const struct {
        void *got, *expected;
        size_t bytes;
    } pairs[] = {{attend.out.data, out.data, out_bytes}, {attend.lse.data, lse.data, lse_bytes}};
    for (int i = 0; i < 2; i++) {
        char *got = malloc(2 * pairs[i].bytes);
        CHECK(got != NULL);
        CHECK_CUDA(cudaMemcpy(got, pairs[i].got, pairs[i].bytes, cudaMemcpyDeviceToHost));
        CHECK_CUDA(cudaMemcpy(got + pairs[i].bytes, pairs[i].expected, pairs[i].bytes, cudaMemcpyDeviceToHost));
        CHECKF(memcmp(got, got + pairs[i].bytes, pairs[i].bytes) == 0, "%s of %d tokens with %zu bytes",
               i ? "lse" : "out", (int)tokens, bytes);
        free(got);
        CHECK_CUDA(cudaFree(pairs[i].got));
    }
    CHECK_CUDA(cudaFree(attend.workspace.data));
}

/* Rows are taken whole, by pieces, quads or units, which two warps or four share, as there is room and work. */
static void cuts_change_nothing(void **state)
{
    (void)state;
    const struct sizes {
        int requests, length, topk, fewer;
    } sizes[] = {{20, 3000, 200, 4}, /* by units: four warps, two; in less room by quads, by pieces */
                 {9, 9000, 1024, 4}, /* by 129 units, by 33 quads; in less room by 17 pieces, whole */
                 {256, 1300, 160, 165} /* by pieces: two warps, four; whole */};
    const size_t room[] = {0, 1 << 20, 16 << 20};
    for (int i = 0; i < 6; i++) {
        const struct sizes *of = &sizes[i / 2];
        world_shape shape = {.requests = of->requests,
                             .heads = 11,
                             .exact_length = of->length,
                             .topk = of->topk,
                             .kv_dtype = i % 2 ? CSA_E4M3 : CSA_BF16};
        twin t;
        make_twin(&t, shape, 82);
        CHECK_OK(queue(DECODE, &t));
        for (int k = 0; k < 3; k++) {
            expect_attended_alike(&t, of->fewer, room[k]);
            expect_attended_alike(&t, of->requests, room[k]);
        }
        end_twin(&t);
    }
}

/* ---- Two contexts at once ----------------------------------------------------------------------- */

typedef struct engine {
    twin t;
    csa_context *context;
    cudaStream_t stream;
    int failures;
} engine;

static void *serve(void *argument)
{
    engine *e = argument;
    csa_step_args step = world_step(&e->t.device);
    step.stream = e->stream;
    for (int i = 0; i < 100; i++)
        e->failures += csa_decode(e->context, &step) != CSA_OK;
    e->failures += cudaStreamSynchronize(e->stream) != cudaSuccess;
    return NULL;
}

static void contexts_share_a_device(void **state)
{
    (void)state;
    if (getenv("CSA_TEST_ONE_HOST_THREAD")) {
        print_message("skipped: CSA_TEST_ONE_HOST_THREAD is set\n");
        skip();
    }
    engine engines[2];
    uint8_t *expected[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        engine *e = &engines[i];
        make_twin(&e->t, (world_shape){.requests = 3 + 9 * i, .heads = 8, .exact_length = 700, .topk = 80},
                  (uint64_t)(74 + i));
        CHECK_OK(queue(DECODE, &e->t));
        to_host(&e->t);
        expected[i] = arena_snapshot(&e->t.host.memory);
        e->context = cuda_context((csa_context_options){0});
        e->failures = 0;
        CHECK_CUDA(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking));
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, serve, &engines[i]) == 0);
    for (int i = 0; i < 2; i++) {
        engine *e = &engines[i];
        pthread_join(threads[i], NULL);
        CHECKF(e->failures == 0, "%d of 101 calls", e->failures);
        to_host(&e->t);
        CHECKF(arena_unchanged(&e->t.host.memory, expected[i]), "context %d", i);
        free(expected[i]);
        CHECK_CUDA(cudaStreamDestroy(e->stream));
        csa_context_destroy(e->context);
        end_twin(&e->t);
    }
}

/* ---- Against ref -------------------------------------------------------------------------------- */

/* Sums of other orders: within `relative` of each value, or of what one summand could be. */
static void expect_near(const char *name, const csa_tensor *got, const csa_tensor *expected, double relative)
{
    const int64_t *n = got->shape;
    CHECK(tensor_count(got) == tensor_count(expected));
    for (int64_t at = 0, count = tensor_count(got); at < count; at++) {
        int64_t index[4] = {0}, left = at;
        for (int d = got->ndim - 1; d >= 0; left /= n[d], d--)
            index[d] = left % n[d];
        double x = tensor_value(got, index[0], index[1], index[2], index[3]),
               y = tensor_value(expected, index[0], index[1], index[2], index[3]);
        CHECKF(x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= relative * (fabs(y) + 0.02),
               "%s [%d, %d, %d, %d] is %.9g, expected %.9g", name, (int)index[0], (int)index[1], (int)index[2],
               (int)index[3], x, y);
    }
}

/* Within a hundredth of each head's length. */
static void expect_heads_near(const csa_tensor *got, const csa_tensor *expected)
{
    int64_t groups = got->shape[1], heads = got->shape[2], count = got->shape[0] * groups * heads;
    for (int64_t i = 0; i < count; i++) {
        int64_t t = i / heads / groups, g = i / heads % groups, h = i % heads;
        double error = 0, length = 0;
        for (int64_t d = 0; d < CSA_HEAD_SIZE; d++) {
            double x = tensor_value(got, t, g, h, d), y = tensor_value(expected, t, g, h, d);
            error += (x - y) * (x - y);
            length += y * y;
        }
        CHECKF(error <= 1e-4 * length, "out of token %d, group %d, head %d: %g of %g", (int)t, (int)g, (int)h,
               sqrt(error), sqrt(length));
    }
}

/* The scores that count. */
static void expect_scores_near(const world *got, const world *expected)
{
    for (int64_t row = 0; row < got->rows; row++) {
        csa_tensor x = tensor_slice(got->scores, row, 1), y = tensor_slice(expected->scores, row, 1);
        x.shape[1] = y.shape[1] = (int64_t)tensor_value(&expected->rows_out.lengths, row, 0, 0, 0);
        expect_near("scores", &x, &y, 1e-4);
    }
}

/* Each stage of a layer against ref on what the stage was given: its inputs may differ in their last bits. */
static void expect_stages_agree(csa_context *ref, world *got, world *expected)
{
    csa_prepare_args prepare = expected->prepare;
    csa_score_args score = world_score(got);
    csa_select_args select = world_select(got);
    csa_attend_args attend = world_attend(got);
    score.query = got->prepare.index_query_out;
    score.weights = got->prepare.index_weights_out;
    score.scores = expected->scores;
    score.rows_out = &expected->rows_out;
    select.selected = expected->selected;
    attend.query = got->prepare.query_out;
    attend.out = expected->out;
    attend.lse = expected->lse;
    CHECK_OK(csa_prepare(ref, &prepare));
    CHECK_OK(csa_score(ref, &score));
    CHECK_OK(csa_select(ref, &select));
    CHECK_OK(csa_attend(ref, &attend));
    expect_near("index_query_out", &got->prepare.index_query_out, &prepare.index_query_out, 0.13);
    expect_near("index_key_out", &got->prepare.index_key_out, &prepare.index_key_out, 0.01);
    expect_near("index_weights_out", &got->prepare.index_weights_out, &prepare.index_weights_out, 0);
    expect_near("query_out", &got->prepare.query_out, &prepare.query_out, 0.01);
    expect_near("kv", &got->cache.kv, &expected->cache.kv, got->cache.kv.dtype == CSA_BF16 ? 0.01 : 0.13);
    tensor_expect_equal("rows.active", &got->rows_out.active, &expected->rows_out.active);
    tensor_expect_equal("rows.current", &got->rows_out.current, &expected->rows_out.current);
    expect_scores_near(got, expected);
    tensor_expect_equal("selected", &got->selected, &expected->selected);
    expect_heads_near(&got->out, &expected->out);
    expect_near("lse", &got->lse, &expected->lse, 1e-3);
}

static world_shape draw_shape(test_random *r)
{
    return (world_shape){
        .groups = RANDOM_OF(r, 1, 2, 8),
        .heads = (int32_t)random_between(r, 1, 16),
        .index_heads = RANDOM_OF(r, 2, 4),
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .topk = RANDOM_OF(r, 1, 7, 64, 512),
        .requests = (int32_t)random_between(r, 1, 5),
        .query_len = RANDOM_OF(r, 1, 2, 4),
        .kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3,
        .max_length = random_between(r, 8, 1200),
        .rotary = RANDOM_OF(r, -1, 64, 192),
        .strided = random_chance(r, 50),
        .inactive = random_chance(r, 50),
    };
}

static void layers_agree_with_ref(void **state)
{
    (void)state;
    csa_context *ref = test_context((csa_context_options){.backend = CSA_BACKEND_REF});
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 80);
        world_shape shape = draw_shape(&r);
        twin t;
        world expected;
        make_twin(&t, shape, (uint64_t)draw);
        world_make(&expected, shape, (uint64_t)draw);
        csa_score_args score = world_score(&t.device);
        score.query = t.device.prepare.index_query_out;
        score.weights = t.device.prepare.index_weights_out;
        score.rows_out = NULL;
        score.stream = stream;
        CHECK_OK(queue(LAYER, &t));
        CHECK_OK(csa_score(context, &score)); /* the layer's own, which it does not show */
        to_host(&t);
        expect_stages_agree(ref, &t.host, &expected);
        world_end(&expected);
        end_twin(&t);
    }
    csa_context_destroy(ref);
}

/* ---- Contexts ----------------------------------------------------------------------------------- */

static void bad_ids_are_named(void **state)
{
    (void)state;
    csa_context *plain = context, *checking = cuda_context((csa_context_options){.check = true});
    twin t;
    make_twin(&t, (world_shape){.requests = 2, .exact_length = 40}, 81);
    context = checking;
    CHECK_OK(queue(LAYER, &t));
    to_host(&t);
    *(int32_t *)tensor_at(&t.host.step.block_table, 1, 2, 0, 0) = 1000;
    to_device(&t);
    uint8_t *before = arena_snapshot(&t.host.memory);
    CHECK(queue(DECODE, &t) == CSA_ERROR_ID);
    CHECKF(strstr(test_error(), "tokens.block_table[1, 2] is 1000"), "%s", test_error());
    to_host(&t);
    CHECK(arena_unchanged(&t.host.memory, before));
    context = plain;
    free(before);
    end_twin(&t);
    csa_context_destroy(checking);
}

static void expect_refused(csa_context_options options, const char *text)
{
    csa_context *none = context;
    options.size = sizeof options;
    options.backend = CSA_BACKEND_CUDA;
    CHECK(csa_context_create(&options, &none) == CSA_ERROR_UNSUPPORTED && !none);
    CHECKF(strstr(test_error(), text), "%s", test_error());
}

static void what_is_not_there_is_refused(void **state)
{
    (void)state;
    char line[256];
    expect_refused((csa_context_options){.device = 9999}, "device is 9999");
    expect_refused((csa_context_options){.device = -1}, "device is -1");
    expect_refused((csa_context_options){.tier = "avx2"}, "tier avx2 is unknown");
    CHECK_OK(csa_device_describe(CSA_BACKEND_CUDA, 0, line, sizeof line));
    CHECKF(strstr(line, "multiprocessors"), "%s", line);
    CHECK(csa_device_describe(CSA_BACKEND_CUDA, 9999, line, sizeof line) == CSA_ERROR_ARGUMENT);
}

int main(void)
{
    char text[256];
    tier = getenv("CSA_TEST_TIER") ? strdup(getenv("CSA_TEST_TIER")) : NULL;
    unsetenv("CSA_TEST_TIER"); /* what support_world.c makes is on the host here */
    unsetenv("CSA_TEST_BACKEND");
    if (csa_backend_describe(CSA_BACKEND_CUDA, text, sizeof text) != CSA_OK) {
        print_message("skipped: no back end cuda here: %s\n", text);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_agree_with_ref),        cmocka_unit_test(graphs_replay_other_lengths),
        cmocka_unit_test(steps_repeat_themselves),      cmocka_unit_test(batch_mates_change_nothing),
        cmocka_unit_test(cuts_change_nothing),          cmocka_unit_test(contexts_share_a_device),
        cmocka_unit_test(decode_takes_many_rows),       cmocka_unit_test(too_many_rows_are_refused),
        cmocka_unit_test(stages_take_many_rows),        cmocka_unit_test(prepare_takes_many_tokens),
        cmocka_unit_test(blocks_may_lie_far_apart),     cmocka_unit_test(bad_ids_are_named),
        cmocka_unit_test(long_rows_are_selected),       cmocka_unit_test(long_steps_select_like_stages),
        cmocka_unit_test(what_is_not_there_is_refused),
    };
    test_seed();
    return cmocka_run_group_tests(tests, start, end);
}
