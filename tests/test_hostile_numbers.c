/*
 * Numbers at the edges: very negative logits, scores that are no numbers, the corners of FP8 and of the
 * summary's softmax, the score's formula, the base of the log-sum-exp. Public faults of each kind are named
 * beside it. SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

static void set_all(csa_tensor *t, double value)
{
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < (t->ndim > 1 ? t->shape[1] : 1); j++)
            for (int64_t k = 0; k < (t->ndim > 2 ? t->shape[2] : 1); k++)
                for (int64_t l = 0; l < (t->ndim > 3 ? t->shape[3] : 1); l++)
                    tensor_put(t, value, i, j, k, l);
}

/* ---- Logits ------------------------------------------------------------------------------------- */

/* flashinfer 4267: a finite number as minus infinity. Every logit is about -454,047. */
static void test_very_negative_logits(void **state)
{
    (void)state;
    const int values[] = {1, 2, 3, 6}; /* mean 3 */
    world w;
    world_make(&w, (world_shape){.exact_length = 64, .topk = 8, .heads = 2, .block_size = 64}, 5000);
    set_all(&w.query, -1024);
    for (int64_t block = 0; block < w.blocks; block++)
        for (int64_t t = 0; t < 64; t++)
            for (int i = 0; i < CSA_HEAD_SIZE; i++) {
                tensor_put(&w.cache.kv, 32, block, 0, t, i);
                tensor_put(&w.cache.kv, values[t % 4] * (1 + i % 3), block, 0, t, CSA_HEAD_SIZE + i);
            }
    csa_step_args step = world_step(&w);
    step.gate = (csa_tensor){0};
    step.scale = 1 / sqrtf(CSA_HEAD_SIZE);
    CHECK_OK(csa_decode(plain_context(), &step));
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        CHECK(tensor_value(&w.out, 0, 0, 1, i) == 3 * (1 + i % 3));
    CHECK(fabs(tensor_value(&w.lse, 0, 0, 0, 0) - (-1024.0 * 32 * 192 / sqrt(192.0) + log(64))) < 8);
    world_end(&w);
}

/* A query beyond fp16 with an FP8 cache: the result is finite. */
static void test_large_query(void **state)
{
    (void)state;
    const double sizes[] = {1e5, -1e5, 65504, 1e30};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        world w;
        world_make(&w, (world_shape){.exact_length = 90, .kv_dtype = CSA_E4M3, .groups = 2, .heads = 3}, 5100);
        set_all(&w.query, sizes[i]);
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(plain_context(), &step));
        expect_step(plain_context(), &step);
        for (int j = 0; j < CSA_HEAD_SIZE; j++)
            CHECK(isfinite(tensor_value(&w.out, 0, 1, 2, j)));
        CHECK(isfinite(tensor_value(&w.lse, 0, 1, 2, 0)));
        world_end(&w);
    }
}

/* sglang 33064: the log-sum-exp is a natural logarithm, so parts with sums 2 and 8 merge 1 to 4. */
static void test_merge_parts(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.exact_length = 10, .topk = 2, .groups = 1, .heads = 1}, 5200);
    set_all(&w.query, 0); /* every token counts 1: region 0 has eight, region 1 two */
    csa_attend_args a = world_attend(&w);
    a.gate = (csa_tensor){0};
    double lse[2], out[2][CSA_HEAD_SIZE];
    for (int64_t region = 0; region < 2; region++) {
        a.selected = ids_i64(&w.memory, "one region", 1, &region);
        a.selected = csa_tensor_2d(a.selected.data, CSA_I64, 1, 1);
        CHECK_OK(csa_attend(plain_context(), &a));
        lse[region] = tensor_value(&w.lse, 0, 0, 0, 0);
        for (int i = 0; i < CSA_HEAD_SIZE; i++)
            out[region][i] = tensor_value(&w.out, 0, 0, 0, i);
    }
    double large = exp(lse[0]) / (exp(lse[0]) + exp(lse[1]));
    CHECK(fabs(large - 0.8) < 1e-5);
    const int64_t both[] = {0, 1};
    a.selected = ids_i64(&w.memory, "both", 2, both);
    a.selected = csa_tensor_2d(a.selected.data, CSA_I64, 1, 2);
    CHECK_OK(csa_attend(plain_context(), &a));
    for (int i = 0; i < CSA_HEAD_SIZE; i++) {
        double merged = large * out[0][i] + (1 - large) * out[1][i];
        CHECK(fabs(tensor_value(&w.out, 0, 0, 0, i) - merged) < 0.02);
    }
    CHECK(fabs(tensor_value(&w.lse, 0, 0, 0, 0) - log(10)) < 1e-5);
    world_end(&w);
}

/* flashinfer 4051, flash-attention 2842: a row of four tokens, beside one of none, cut as finely as it goes. */
static void test_merge_empty_parts(void **state)
{
    (void)state;
    const int threads[] = {1, 2, 7, 64};
    world w;
    world_make(&w, (world_shape){.requests = 2, .exact_length = 4, .groups = 2, .heads = 16}, 5300);
    *(int64_t *)tensor_at(&w.step.slots, 1, 0, 0, 0) = -1;
    csa_tensor out = {0}, lse = {0};
    for (int i = 0; i < COUNT_OF(threads); i++) {
        csa_context *context =
            test_context((csa_context_options){.threads = threads[i], .parallel_for = pool_for});
        csa_step_args step = world_step(&w);
        tensor_set(&w.out, 0xFF);
        CHECK_OK(csa_decode(context, &step));
        expect_step(context, &step); /* the inactive row: 0 and -inf */
        if (i == 0) {
            out = copy_of(&w.memory, &w.out);
            lse = copy_of(&w.memory, &w.lse);
        }
        tensor_expect_equal("out", &w.out, &out);
        tensor_expect_equal("lse", &w.lse, &lse);
        csa_context_destroy(context);
    }
    world_end(&w);
}

/* ---- Scores ------------------------------------------------------------------------------------- */

typedef struct score_list {
    arena memory;
    csa_select_args args;
} score_list;

static score_list make_scores(int rows, int regions, int topk)
{
    score_list s = {.args = {.size = sizeof s.args, .topk = topk}};
    int width = topk < regions ? topk : regions;
    s.args.scores = arena_tensor(&s.memory, "scores", NULL, CSA_F32, 2, rows, regions);
    s.args.current = arena_tensor(&s.memory, "current", NULL, CSA_I64, 1, rows);
    s.args.selected = arena_tensor(&s.memory, "selected", NULL, CSA_I64, 2, rows, width + 1);
    return s;
}

static void select_and_compare(score_list *s)
{
    CHECK_OK(csa_select(plain_context(), &s->args));
    expect_selected(&s->args);
    csa_tensor first = copy_of(&s->memory, &s->args.selected);
    tensor_set(&s->args.selected, 0xFF);
    CHECK_OK(csa_select(plain_context(), &s->args));
    tensor_expect_equal("selected again", &s->args.selected, &first);
    arena_check(&s->memory);
    arena_free(&s->memory);
}

static void put_scores(score_list *s, int64_t row, int64_t first, int64_t end, double value)
{
    for (int64_t i = first; i < end; i++)
        tensor_put(&s->args.scores, value, row, i, 0, 0);
}

/* vllm 49896: NaN ranks last, infinities by their order; rows are full, their ids distinct. */
static void test_nonfinite_scores(void **state)
{
    (void)state;
    test_random r = random_of(5400, 0);
    score_list s = make_scores(9, 64, 16);
    for (int64_t row = 0; row < 9; row++) {
        *(int64_t *)tensor_at(&s.args.current, row, 0, 0, 0) = 63;
        for (int64_t i = 0; i < 64; i++)
            tensor_put(&s.args.scores, random_normal(&r), row, i, 0, 0);
    }
    put_scores(&s, 0, 20, 21, NAN);
    put_scores(&s, 1, 0, 64, NAN);
    put_scores(&s, 2, 10, 50, INFINITY);
    put_scores(&s, 3, 0, 64, -INFINITY);
    put_scores(&s, 4, 0, 50, NAN); /* the 13 numbers, then three NaN */
    put_scores(&s, 5, 0, 30, NAN);
    put_scores(&s, 5, 30, 64, -INFINITY); /* minus infinity before NaN */
    put_scores(&s, 6, 5, 15, INFINITY);
    put_scores(&s, 6, 15, 60, NAN);
    put_scores(&s, 7, 0, 32, -0.0); /* equal to +0: the smaller regions */
    put_scores(&s, 7, 32, 64, 0.0);
    put_scores(&s, 8, 0, 64, 0x1p-149); /* denormal numbers are above 0 */
    put_scores(&s, 8, 0, 40, 0.0);
    select_and_compare(&s);
}

/* cudnn-frontend 446, flashinfer 5095: lanes past the end. */
static void test_lanes_past_the_end(void **state)
{
    (void)state;
    score_list s = make_scores(1, 51, 16);
    *(int64_t *)s.args.current.data = 50;
    put_scores(&s, 0, 0, 51, -INFINITY);
    put_scores(&s, 0, 13, 14, 1);
    put_scores(&s, 0, 31, 32, 3);
    put_scores(&s, 0, 49, 50, 2);
    select_and_compare(&s);
    s = make_scores(130, 130, 16);
    for (int64_t row = 0; row < 130; row++) { /* lengths 1 to 130, 1e30 behind them */
        *(int64_t *)tensor_at(&s.args.current, row, 0, 0, 0) = row;
        put_scores(&s, row, 0, row, -1e30);
        put_scores(&s, row, row / 2, row / 2 + 1, -1e29);
        put_scores(&s, row, row, 130, 1e30);
    }
    select_and_compare(&s);
}

/* Junk in a list's padding, here ids that would do: only the last min(position / 8 + 1, W) entries count. */
static void test_junk_in_padding(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 3, .max_length = 40, .groups = 2, .topk = 30}, 5500);
    w.selected = arena_tensor(&w.memory, "wide list", NULL, CSA_I64, 2, (int)w.rows, 31);
    for (int64_t row = 0; row < w.rows; row++) {
        int64_t current = spec_seat(&w.step, row / 2).position / 8;
        for (int64_t i = 0; i < 31; i++)
            *(int64_t *)tensor_at(&w.selected, row, i, 0, 0) =
                i < 30 - current ? i % (current + 1) : i - 30 + current;
    }
    csa_attend_args a = world_attend(&w);
    CHECK_OK(csa_attend(plain_context(), &a));
    expect_attended(&a);
    world_end(&w);
}

/* One token, heads whose queries are unit vectors; region r's summary is `value` at channel `channel`. */
static void unit_world(world *w, const float *weights)
{
    world_make(w, (world_shape){.exact_length = 33, .topk = 1, .index_heads = 2}, 5600);
    tensor_set(&w->index_query, 0);
    tensor_set(&w->cache.summaries, 0);
    for (int head = 0; head < 2; head++) {
        tensor_put(&w->index_query, 1, 0, 0, head, head);
        tensor_put(&w->index_weights, (double)weights[head], 0, 0, head, 0);
    }
}

static void put_summary(world *w, int64_t region, int channel, double value)
{
    int64_t slot = world_slot(w, 0, region * 8);
    tensor_put(&w->cache.summaries, value, slot / 16, slot % 16 / 8, channel, 0);
}

static double score_of(const world *w, int64_t region)
{
    return tensor_value(&w->scores, 0, region, 0, 0);
}

/* transformers 44360, axolotl PR 3832: the maximum is taken per head, before the weight. */
static void test_score_formula(void **state)
{
    (void)state;
    world w;
    unit_world(&w, (float[]){-1, 2});
    put_summary(&w, 0, 0, 5);  /* -1 * 5 */
    put_summary(&w, 1, 0, -5); /* a negative dot counts 0, whatever its weight */
    put_summary(&w, 2, 1, -5);
    put_summary(&w, 3, 1, 3);
    put_summary(&w, 3, 0, 4);
    csa_score_args score = world_score(&w);
    csa_select_args select = world_select(&w);
    CHECK_OK(csa_score(plain_context(), &score));
    expect_scores(&score);
    CHECK(score_of(&w, 0) == -5 && score_of(&w, 1) == 0 && score_of(&w, 2) == 0 && score_of(&w, 3) == 2);
    CHECK_OK(csa_select(plain_context(), &select));
    CHECK(*(int64_t *)tensor_at(&w.selected, 0, 0, 0, 0) == 3);
    world_end(&w);
}

/* Two regions that differ only through weights of 1.001 and 1.000. */
static void test_close_weights(void **state)
{
    (void)state;
    for (int64_t best = 0; best < 2; best++) {
        world w;
        unit_world(&w, best ? (float[]){1.000F, 1.001F} : (float[]){1.001F, 1.000F});
        put_summary(&w, 0, 0, 1);
        put_summary(&w, 1, 1, 1);
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(plain_context(), &step));
        CHECK(*(int64_t *)tensor_at(&w.selected, 0, 0, 0, 0) == best);
        world_end(&w);
    }
}

/* NaN and the largest numbers in queries, summaries and weights. */
static void test_scores_of_corners(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(30); draw++) {
        const uint8_t codes[] = {0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x80, 0x81, 0x08};
        const float weights[] = {NAN, INFINITY, -INFINITY, 3e38F, -3e38F, 0x1p-149F, 0, -0.0F};
        world w;
        test_set_draw(draw);
        world_shape shape = {.requests = 2, .groups = 2, .max_length = 60};
        shape.index_heads = (int32_t[]){1, 2, 3, 5, 8, 16}[draw % 6];
        world_make(&w, shape, 5700 + (uint64_t)draw);
        for (int i = 0; i < 40; i++) {
            int64_t t = random_between(&w.random, 0, 1), g = random_between(&w.random, 0, 1);
            int64_t h = random_between(&w.random, 0, shape.index_heads - 1),
                    c = random_between(&w.random, 0, 255);
            *(uint8_t *)tensor_at(&w.index_query, t, g, h, c) =
                codes[random_between(&w.random, i % 3 ? 2 : 0, 7)];
            *(uint8_t *)tensor_at(&w.cache.summaries, i % w.blocks, i % 2, c, 0) = codes[i % 8];
            if (i % 8 == 0)
                *(float *)tensor_at(&w.index_weights, t, g, h, 0) = weights[random_between(&w.random, 0, 7)];
        }
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(plain_context(), &step));
        expect_step(plain_context(), &step);
        world_end(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_very_negative_logits), cmocka_unit_test(test_large_query),
        cmocka_unit_test(test_merge_parts),          cmocka_unit_test(test_merge_empty_parts),
        cmocka_unit_test(test_nonfinite_scores),     cmocka_unit_test(test_lanes_past_the_end),
        cmocka_unit_test(test_junk_in_padding),      cmocka_unit_test(test_score_formula),
        cmocka_unit_test(test_close_weights),        cmocka_unit_test(test_scores_of_corners),

    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
