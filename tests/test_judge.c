/*
 * The judge: number formats against those of support.c, scores, selections and attention against values worked
 * out by hand, and tolerances at their edges.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include "judge.h"

/* ---- Numbers ------------------------------------------------------------------------------------ */

static bool same(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

static void numbers_are_read_and_rounded(void **state)
{
    (void)state;
    for (int code = 0; code < 65536; code++) {
        uint16_t bits = (uint16_t)code;
        double value = judge_value(CSA_BF16, &bits, 0);
        CHECKF(same(value, (double)bf16_value(bits)), "bf16 code %d", code);
        CHECKF(same(judge_round_bf16(value), value), "bf16 code %d", code);
    }
    for (int code = 0; code < 256; code++) {
        uint8_t bits = (uint8_t)code;
        double value = judge_value(CSA_E4M3, &bits, 0);
        CHECKF(same(value, (double)e4m3_value(bits)), "e4m3 code %d", code);
        CHECKF(judge_to_e4m3(value) == (isnan(value) ? 0x7F : code), "e4m3 code %d", code);
    }
    test_random r = random_of(1, 1);
    for (int i = 0; i < 100000; i++) {
        test_set_draw(i);
        float x = (float)ldexp(random_normal(&r), (int)random_between(&r, -20, 12));
        CHECKF(judge_to_e4m3((double)x) == e4m3_code(x), "%a", (double)x);
        CHECKF(judge_round_bf16((double)x) == (double)bf16_rounded(x), "%a", (double)x);
    }
    CHECK(isinf(judge_round_bf16(3.4e38)) && judge_round_bf16(0x1p-134) == 0);
    CHECK(judge_round_bf16(0x1.8p-133) == 0x1p-132 && judge_to_e4m3(-INFINITY) == 0xFE);
}

static void steps_count_codes(void **state)
{
    (void)state;
    const uint8_t e4m3[] = {0x00, 0x80, 0x01, 0x81, 0x7E, 0x7F, 0xFF, 0x38};
    CHECK(judge_steps(CSA_E4M3, &e4m3[0], &e4m3[1], 0) == 1);
    CHECK(judge_steps(CSA_E4M3, &e4m3[2], &e4m3[3], 0) == 2);
    CHECK(judge_steps(CSA_E4M3, &e4m3[5], &e4m3[6], 0) == 0);
    CHECK(judge_steps(CSA_E4M3, &e4m3[4], &e4m3[5], 0) == INT64_MAX);
    const uint16_t bf16[] = {0x3F80, 0x3F83, 0xBF80, 0x7FC0, 0xFF81};
    CHECK(judge_steps(CSA_BF16, bf16, bf16, 0) == 0 && judge_steps(CSA_BF16, &bf16[0], &bf16[1], 0) == 3);
    CHECK(judge_steps(CSA_BF16, &bf16[0], &bf16[2], 0) == 2 * 0x3F80);
    CHECK(judge_steps(CSA_BF16, &bf16[3], &bf16[4], 0) == 0);
    CHECK(judge_steps(CSA_BF16, &bf16[3], &bf16[0], 0) == INT64_MAX);
    const float one = 1, next = nextafterf(1, 2);
    CHECK(judge_steps(CSA_F32, &one, &next, 0) == 1);
    const int64_t numbers[] = {5, 6};
    CHECK(judge_steps(CSA_I64, &numbers[0], &numbers[1], 0) == INT64_MAX);
    const uint8_t truths[] = {1, 2, 0};
    CHECK(judge_steps(CSA_BOOL, &truths[0], &truths[1], 0) == 0);
    CHECK(judge_steps(CSA_BOOL, &truths[0], &truths[2], 0) == INT64_MAX);
}

/* ---- Scores ------------------------------------------------------------------------------------- */

/* 4 heads, all queries 1, all keys `key`. */
static float score_of(const float *weights, uint8_t key, double *bound)
{
    uint8_t query[4 * CSA_SUMMARY_SIZE], summary[CSA_SUMMARY_SIZE];
    judge_query loaded;
    float score;
    memset(query, e4m3_code(1), sizeof query);
    memset(summary, key, sizeof summary);
    judge_load_query(&loaded, CSA_E4M3, query, weights, 0, 4, 4);
    judge_score(&loaded, summary, &score, bound);
    return score;
}

static void scores_by_hand(void **state)
{
    (void)state;
    double bound;
    const float weights[] = {1, -2, 0.5F, 3}, odd[] = {INFINITY, 1, 1, 1};
    CHECK(score_of(weights, e4m3_code(0.5F), &bound) == 2.5F * 128);
    CHECK(bound == ldexp(6.5 * 128, -18));
    CHECK(score_of(weights, e4m3_code(-0.5F), &bound) == 0 && bound == ldexp(6.5 * 128, -18));
    CHECK(score_of(weights, 0x7F, &bound) == 0 && bound == 0x1p-140);
    CHECK(isnan(score_of(odd, 0x7F, &bound)) && isinf(score_of(odd, 0x38, &bound)));
    CHECK(judge_score_within(1, 1.25F, 0.25) && !judge_score_within(1, 1.25F, 0.2499));
    CHECK(judge_score_within(NAN, NAN, 0) && !judge_score_within(NAN, 0, 1) && !judge_score_within(0, NAN, 1));
    CHECK(judge_score_within(INFINITY, INFINITY, 0) && !judge_score_within(INFINITY, -INFINITY, 1e300));
}

/* ---- Selection ---------------------------------------------------------------------------------- */

static void expect_list(const float *scores, int64_t regions, int64_t current, int64_t topk,
                        const char *expected)
{
    int64_t list[16];
    char text[128] = "";
    assert_true(judge_select(scores, regions, current, topk, list));
    for (int64_t i = 0; i <= (topk < regions ? topk : regions); i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i > 0 ? " " : "",
                 (long long)list[i]);
    assert_string_equal(text, expected);
}

static void selections_by_hand(void **state)
{
    (void)state;
    const float scores[] = {1, NAN, -INFINITY, 3, 3, -0.0F, 0, 9};
    expect_list(scores, 8, 7, 3, "0 3 4 7");
    expect_list(scores, 8, 4, 1, "3 4");
    expect_list(scores, 8, 7, 4, "0 3 4 5 7");
    expect_list(scores, 8, 3, 2, "0 2 3");
    expect_list(scores, 8, 2, 3, "-1 0 1 2");
    expect_list(scores, 8, 99, 1, "3 7");
    expect_list(scores, 8, -1, 2, "-1 -1 -1");
    expect_list(NULL, 3, 2, 3, "-1 0 1 2");
    expect_list(NULL, 3, 7, 5, "-1 0 1 2");
    expect_list(NULL, 0, 0, 5, "-1");
}

/* ---- Attention ---------------------------------------------------------------------------------- */

/* One request of three blocks of 16, block table 2, -1, 0; in a token's row all keys are 0 but the first, which
 * is 1, and all values are the token's number. */
typedef struct small_world {
    uint16_t kv[3][16][CSA_KV_SIZE];
    int32_t table[3];
    uint16_t query[1][CSA_HEAD_SIZE];
    judge_cache cache;
    judge_attend_args args;
} small_world;

static void make_small(small_world *w)
{
    memset(w, 0, sizeof *w);
    memcpy(w->table, (int32_t[]){2, -1, 0}, sizeof w->table);
    for (int b = 0; b < 3; b++)
        for (int t = 0; t < 16; t++) {
            w->kv[b][t][0] = bf16_code(1);
            for (int i = CSA_HEAD_SIZE; i < CSA_KV_SIZE; i++)
                w->kv[b][t][i] = bf16_code((float)((b == 2 ? 0 : b == 0 ? 32 : 1000) + t));
        }
    w->cache = (judge_cache){.k_scale = 1, .v_scale = 1};
    w->cache.table = csa_tensor_2d(w->table, CSA_I32, 1, 3);
    w->cache.kv = csa_tensor_4d(w->kv, CSA_BF16, 3, 1, 16, CSA_KV_SIZE);
    w->args = (judge_attend_args){.cache = &w->cache, .scale = 1, .heads = 1, .query = w->query[0]};
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-14 * fabs(b);
}

static double attend(small_world *w, judge_row row, const int64_t *list, int64_t columns)
{
    double out[JUDGE_HEADS][CSA_HEAD_SIZE];
    w->args.list = list;
    w->args.columns = columns;
    judge_attend(&w->args, row, 0, 0, out);
    for (int i = 1; i < CSA_HEAD_SIZE; i++)
        CHECK(same(out[0][i], out[0][0]));
    return out[0][0];
}

static void attention_by_hand(void **state)
{
    (void)state;
    small_world w;
    make_small(&w);
    judge_row row = {true, 37, 0}, second = {true, 3, 0}, idle = {false, 37, 0}, lost = {true, 37, 1};
    CHECK(near(attend(&w, row, (int64_t[]){-1, 0, 4}, 3), (3.5 * 8 + 34.5 * 6) / 14));
    CHECK(near(attend(&w, row, (int64_t[]){2, 3, 4}, 3), 34.5));         /* no block */
    CHECK(near(attend(&w, row, (int64_t[]){5, INT64_MAX, 4}, 3), 34.5)); /* past the position */
    CHECK(near(attend(&w, row, (int64_t[]){0, 0, 1}, 3), (3.5 * 16 + 11.5 * 8) / 24));
    CHECK(attend(&w, second, (int64_t[]){1, 0, 0}, 3) == 1.5); /* one entry is used */
    CHECK(attend(&w, idle, (int64_t[]){0}, 1) == 0 && attend(&w, lost, (int64_t[]){0}, 1) == 0);
    w.table[0] = 3;
    CHECK(attend(&w, row, (int64_t[]){0}, 1) == 0);
    w.table[0] = 2;
    /* Two tokens whose weights are 1 and e; gate 0 halves. */
    w.query[0][0] = bf16_code(1);
    w.kv[2][0][0] = 0;
    const uint16_t gate = 0;
    w.args.gate = &gate;
    double expected = exp(1) / (1 + exp(1)) / 2;
    CHECK(near(attend(&w, (judge_row){true, 1, 0}, (int64_t[]){0}, 1), expected));
    w.cache.v_scale = 4;
    w.args.gate = NULL;
    CHECK(near(attend(&w, (judge_row){true, 1, 0}, (int64_t[]){0}, 1), 8 * expected));
    /* A finite number is no minus infinity. */
    w.query[0][0] = bf16_code(-0x1p60F);
    w.kv[2][0][0] = w.kv[2][1][0] = bf16_code(0x1p60F);
    CHECK(attend(&w, (judge_row){true, 1, 0}, (int64_t[]){0}, 1) == 2);
}

static void norms_at_their_edges(void **state)
{
    (void)state;
    double exact[CSA_HEAD_SIZE] = {0};
    uint16_t got[CSA_HEAD_SIZE] = {0};
    judge_norms n = {0};
    judge_norms_add(&n, exact, got);
    got[3] = 0x8000;
    judge_norms_add(&n, exact, got);
    CHECK(n.nonzero == 0 && judge_norms_total(&n) == 0);
    got[3] = 1;
    judge_norms_add(&n, exact, got);
    CHECK(n.nonzero == 1 && n.misplaced == 0);
    n = (judge_norms){0};
    exact[0] = 4;
    exact[1] = 3;
    got[0] = bf16_code(4);
    got[1] = bf16_code(2.5F);
    judge_norms_add(&n, exact, got);
    CHECK(n.worst == 0.1 && judge_norms_total(&n) == 0.1);
    exact[2] = NAN;
    exact[4] = INFINITY;
    got[2] = 0x7FC0;
    got[4] = 0x7F80;
    judge_norms_add(&n, exact, got);
    CHECK(n.misplaced == 0 && judge_norms_total(&n) == 0.1);
    got[2] = 0;
    got[4] = 0xFF80;
    judge_norms_add(&n, exact, got);
    CHECK(n.misplaced == 2);
    /* Rounding may take the largest numbers over the edge, or not. */
    exact[2] = 0;
    exact[4] = 0x1.FFp127;
    got[4] = 0x7F80;
    judge_norms_add(&n, exact, got);
    got[4] = 0x7F7F;
    judge_norms_add(&n, exact, got);
    CHECK(n.misplaced == 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_read_and_rounded),
        cmocka_unit_test(steps_count_codes),
        cmocka_unit_test(scores_by_hand),
        cmocka_unit_test(selections_by_hand),
        cmocka_unit_test(attention_by_hand),
        cmocka_unit_test(norms_at_their_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
