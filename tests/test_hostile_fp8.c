/*
 * The corners of FP8, in the cache and in queries, and of the softmax that makes summaries.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

/* ---- FP8 in the cache (ml_dtypes 400, Model-Optimizer 1633) ------------------------------------- */

typedef struct corner {
    float value;
    uint8_t code;
} corner;

/* Prepares one token whose value head starts with the numbers, and returns the cache's codes of it. */
static const uint8_t *cached_values(world *w, int count, const float *values, float scale)
{
    world_make(w, (world_shape){.exact_length = 20, .kv_dtype = CSA_E4M3}, 5800);
    for (int i = 0; i < count; i++)
        *(uint16_t *)tensor_at(&w->prepare.value, 0, 0, i, 0) = bf16_code(values[i]);
    w->cache.v_scale = &scale;
    CHECK_OK(csa_prepare(plain_context(), &w->prepare));
    w->cache.v_scale = NULL;
    int64_t slot = world_slot(w, 0, 19);
    return tensor_at(&w->cache.kv, slot / 16, 0, slot % 16, CSA_HEAD_SIZE);
}

static void test_fp8_corners(void **state)
{
    (void)state;
    const corner corners[] = {
        {448, 0x7E},      {-448, 0xFE},      {464, 0x7E},         {480, 0x7E},       {-480, 0xFE},
        {1000, 0x7E},     {INFINITY, 0x7E},  {-INFINITY, 0xFE},   {NAN, 0x7F},       {-NAN, 0x7F},
        {0x1p-9F, 0x01},  {0x1p-10F, 0x00},  {0x1.8p-10F, 0x01},  {-0.0F, 0x80},     {0, 0x00},
        {-0x1p-9F, 0x81}, {-0x1p-10F, 0x80}, {0x1.02p-10F, 0x01}, {0x1.8p-9F, 0x02}, {0x1p-6F, 0x08},
        {440, 0x7E},      {432, 0x7E},       {424, 0x7D},         {400, 0x7C},       {0x1.Ep-7F, 0x08},
        {0x1.1p0F, 0x38},
    };
    float values[COUNT_OF(corners)];
    for (int i = 0; i < COUNT_OF(corners); i++)
        values[i] = corners[i].value;
    world w;
    const uint8_t *codes = cached_values(&w, COUNT_OF(corners), values, 1);
    for (int i = 0; i < COUNT_OF(corners); i++)
        CHECKF(codes[i] == corners[i].code, "%g is 0x%02x, expected 0x%02x", (double)values[i], codes[i],
               corners[i].code);
    world_end(&w);
    const float one[] = {1, -1, 0.97F}; /* 465 is no bf16 number: by the scale */
    codes = cached_values(&w, 3, one, 1 / 465.0F);
    CHECK(codes[0] == 0x7E && codes[1] == 0xFE && codes[2] == 0x7E);
    world_end(&w);
}

/* A reciprocal of the scale would change these codes. */
static void test_true_division(void **state)
{
    (void)state;
    const float scales[] = {3, 0.7F, 1.1F, 0.013F, 7};
    int found = 0;
    for (int s = 0; s < COUNT_OF(scales); s++) {
        float values[64], inverse = 1 / scales[s];
        int count = 0;
        for (int code = 0; code < 0x7F80 && count < 64; code++) {
            float x = bf16_value((uint16_t)code);
            if (e4m3_code(x / scales[s]) != e4m3_code(x * inverse))
                values[count++] = x;
        }
        world w;
        const uint8_t *codes = cached_values(&w, count, values, scales[s]);
        for (int i = 0; i < count; i++)
            CHECK(codes[i] == e4m3_code(values[i] / scales[s]));
        found += count;
        world_end(&w);
    }
    CHECK(found > 0);
}

/* Norm weights that carry the index query past 448, and keys past it through their scale. */
static void test_saturated_queries(void **state)
{
    (void)state;
    world w;
    float scale = 0x1p-20F;
    world_make(&w, (world_shape){.exact_length = 20, .kv_dtype = CSA_E4M3, .rotary = -1}, 5900);
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++)
        tensor_put(&w.prepare.index_query_norm, 0x1p14, i, 0, 0, 0);
    w.cache.k_scale = &scale;
    CHECK_OK(csa_prepare(plain_context(), &w.prepare));
    int64_t slot = world_slot(&w, 0, 19), query = 0, key = 0;
    for (int i = 0; i < CSA_SUMMARY_SIZE; i++) {
        uint8_t code = *(uint8_t *)tensor_at(&w.prepare.index_query_out, 0, 0, 0, i);
        CHECK((code & 0x7F) != 0x7F); /* no NaN */
        query += (code & 0x7F) == 0x7E;
    }
    for (int i = 0; i < CSA_HEAD_SIZE; i++)
        key += (*(uint8_t *)tensor_at(&w.cache.kv, slot / 16, 0, slot % 16, i) & 0x7F) == 0x7E;
    CHECK(query > 200 && key > 150);
    w.cache.k_scale = NULL;
    world_end(&w);
}

/* ---- Summaries ---------------------------------------------------------------------------------- */

/* Summarises one region of eight tokens and compares all codes with the formula's. */
static void summarize_rows(float rows[8][512], uint8_t got[256])
{
    world w;
    const int32_t starts[] = {0, 8};
    uint8_t expected[256];
    world_make(&w, (world_shape){.query_len = 8, .exact_length = 8}, 6000);
    w.step.query_start = ids_i32(&w.memory, "query_start", 2, starts);
    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 256; i++) {
            tensor_put(&w.prepare.index_key_out, (double)rows[t][i], t, i, 0, 0);
            tensor_put(&w.z, (double)rows[t][256 + i], t, i, 0, 0);
        }
    csa_summarize_args a = world_summarize(&w);
    CHECK_OK(csa_summarize_prefill(plain_context(), &a));
    int64_t slot = world_slot(&w, 0, 0);
    memcpy(got, tensor_at(&w.cache.summaries, slot / 16, slot % 16 / 8, 0, 0), 256);
    spec_summary(rows, expected);
    for (int i = 0; i < 256; i++)
        CHECKF(got[i] == expected[i], "channel %d is 0x%02x, expected 0x%02x", i, got[i], expected[i]);
    world_end(&w);
}

static void random_rows(float rows[8][512], uint64_t draw)
{
    test_random r = random_of(6100, draw);
    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 512; i++)
            rows[t][i] = bf16_rounded((float)random_normal(&r));
}

/* z is -inf for seven of eight rows, then for all: while all have been, the result is NaN. */
static void test_infinite_z(void **state)
{
    (void)state;
    float rows[8][512];
    uint8_t got[256];
    for (int finite = 0; finite <= 8; finite++) {
        random_rows(rows, (uint64_t)finite);
        for (int t = 0; t < 8; t++)
            for (int i = 256; i < 512 && t != finite; i++)
                rows[t][i] = -INFINITY;
        summarize_rows(rows, got);
        for (int i = 0; i < 256; i++)
            CHECK(got[i] == (finite == 0 ? e4m3_code(rows[0][i]) : 0x7F));
    }
}

/* Single channels of -inf weigh nothing; one of NaN makes all of the region NaN. */
static void test_odd_channels(void **state)
{
    (void)state;
    float rows[8][512];
    uint8_t got[256];
    random_rows(rows, 20);
    for (int t = 0; t < 8; t++) {
        rows[t][256 + 9] = -INFINITY;
        rows[t][256 + 11] = t == 5 ? 1.0F : -INFINITY;
    }
    summarize_rows(rows, got);
    CHECK(got[9] == 0 && got[11] == e4m3_code(rows[5][11]));
    rows[3][256 + 77] = NAN;
    summarize_rows(rows, got);
    for (int i = 0; i < 256; i++)
        CHECK(got[i] == 0x7F);
}

/* z of large spread: one maximum for all channels, and a floor of 1e-20 under the denominator. */
static void test_spread_z(void **state)
{
    (void)state;
    float rows[8][512];
    uint8_t got[256];
    random_rows(rows, 30);
    for (int t = 0; t < 8; t++)
        for (int i = 0; i < 256; i++) {
            rows[t][i] = 4;
            rows[t][256 + i] = bf16_rounded((float)(-i) / 2);
        }
    summarize_rows(rows, got);
    CHECK(got[0] == e4m3_code(4) && got[80] == e4m3_code(4)); /* sum of weights 8 e^-40 = 3.4e-17 */
    float floored = bf16_rounded((float)(4 * 8 * exp(-50) / 1e-20));
    CHECK(got[100] == e4m3_code(floored)); /* 8 e^-50 = 1.5e-21 */
    CHECK(got[255] == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_corners),       cmocka_unit_test(test_true_division),
        cmocka_unit_test(test_saturated_queries), cmocka_unit_test(test_infinite_z),
        cmocka_unit_test(test_odd_channels),      cmocka_unit_test(test_spread_z),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
