/*
 * Sizes, block sizes, alignment and pitches: the right result, or an error that names the value and what would
 * be accepted. Shapes too large for any arithmetic are refused without overflow.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

/* ---- Sizes baked in (ds4 471, TensorRT-LLM PR 8882) --------------------------------------------- */

static void select_topk(int topk, int regions)
{
    arena memory = {0};
    test_random r = random_of(8000, (uint64_t)topk);
    csa_select_args a = {.size = sizeof a, .topk = topk};
    int width = topk < regions ? topk : regions;
    const int64_t currents[] = {regions - 1, topk, topk + 1, regions / 2};
    a.scores = arena_tensor(&memory, "scores", &r, CSA_F32, 2, 4, regions);
    tensor_randomise(&a.scores, &r, 1);
    a.current = ids_i64(&memory, "current", 4, currents);
    a.selected = arena_tensor(&memory, "selected", &r, CSA_I64, 2, 4, width + 1);
    if (topk > CSA_MAX_TOPK) {
        expect_refused(csa_select(plain_context(), &a), CSA_ERROR_UNSUPPORTED, "topk is 1025", "1 to 1024",
                       NULL);
    } else {
        CHECK_OK(csa_select(plain_context(), &a));
        expect_selected(&a);
    }
    arena_check(&memory);
    arena_free(&memory);
}

static void test_topk(void **state)
{
    (void)state;
    const int values[] = {1, 2, 511, 512, 513, 1023, 1024, 1025};
    for (int i = 0; i < COUNT_OF(values); i++) {
        select_topk(values[i], 1500);
        if (values[i] > 2)
            select_topk(values[i], values[i]); /* everything is selected */
    }
    csa_select_args a = {.size = sizeof a, .topk = -1};
    expect_refused(csa_select(plain_context(), &a), CSA_ERROR_UNSUPPORTED, "topk is -1", "1 to 1024", NULL);
}

/* The widest lists through attention. */
static void test_wide_lists(void **state)
{
    (void)state;
    const int topk[] = {513, 1024};
    for (int i = 0; i < 2; i++) {
        world w;
        world_make(&w, (world_shape){.exact_length = 8 * 1040, .topk = topk[i], .heads = 1}, 8050);
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(plain_context(), &step));
        expect_step(plain_context(), &step);
        csa_attend_args attend = world_attend(&w);
        attend.selected = csa_tensor_2d(attend.selected.data, CSA_I64, 1, CSA_MAX_TOPK + 2);
        expect_refused(csa_attend(plain_context(), &attend), CSA_ERROR_UNSUPPORTED, "1026", "1 to 1025", NULL);
        world_end(&w);
    }
}

static void test_heads(void **state)
{
    (void)state;
    for (int heads = 1; heads <= 17; heads++) {
        world w;
        bool index = heads <= 8 || heads == 16;
        world_make(&w, (world_shape){.requests = 2, .groups = 2, .heads = heads < 17 ? heads : 16}, 8100);
        if (heads == 17) {
            w.query = arena_tensor(&w.memory, "query", NULL, CSA_BF16, 4, 2, 2, 17, CSA_HEAD_SIZE);
            w.out = arena_tensor(&w.memory, "out", NULL, CSA_BF16, 4, 2, 2, 17, CSA_HEAD_SIZE);
            w.gate = w.lse = (csa_tensor){0};
        }
        csa_step_args step = world_step(&w);
        step.index_query = arena_tensor(&w.memory, "index query", NULL, CSA_E4M3, 4, 2, 2, heads, 256);
        step.index_weights = arena_tensor(&w.memory, "index weights", NULL, CSA_F32, 3, 2, 2, heads);
        tensor_randomise(&step.index_query, &w.random, 1);
        tensor_randomise(&step.index_weights, &w.random, 1);
        csa_status status = csa_decode(plain_context(), &step);
        if (!index)
            expect_refused(status, CSA_ERROR_UNSUPPORTED, "index heads", "1 to 8, 16", NULL);
        step.index_query = w.index_query;
        step.index_weights = w.index_weights;
        if (!index)
            status = csa_decode(plain_context(), &step);
        if (heads > CSA_MAX_HEADS)
            expect_refused(status, CSA_ERROR_UNSUPPORTED, "query heads per group is 17", "1 to 16", NULL);
        else
            CHECK_OK(csa_decode(plain_context(), &step));
        if (heads <= CSA_MAX_HEADS)
            expect_step(plain_context(), &step);
        world_end(&w);
    }
}

/* One extent of a step's arguments is not the model's. */
static void expect_unsupported(world *w, csa_tensor *t, int extent, int64_t value, const char *allowed)
{
    csa_tensor kept = *t;
    char number[32];
    t->shape[extent] = value;
    for (int d = t->ndim - 2; d >= 0; d--)
        t->stride[d] = t->stride[d + 1] * t->shape[d + 1];
    snprintf(number, sizeof number, "is %lld", (long long)value);
    csa_step_args step = world_step(w);
    step.regions = 4;
    expect_refused(csa_decode(plain_context(), &step), CSA_ERROR_UNSUPPORTED, number, allowed, NULL);
    *t = kept;
}

static void test_other_sizes(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 1, .block_size = 128, .groups = 2}, 8200);
    const int64_t blocks[] = {1, 7, 8, 15, 24, 63, 96, 127, 256, 0};
    for (int i = 0; i < COUNT_OF(blocks); i++)
        expect_unsupported(&w, &w.cache.kv, 2, blocks[i], "16, 32, 64, 128");
    expect_unsupported(&w, &w.query, 3, 191, "192");
    expect_unsupported(&w, &w.out, 3, 193, "192");
    expect_unsupported(&w, &w.index_query, 3, 255, "256");
    expect_unsupported(&w, &w.cache.summaries, 2, 128, "256");
    expect_unsupported(&w, &w.cache.kv, 3, 383, "384");
    expect_unsupported(&w, &w.cache.ring, 1, 511, "512");
    world_end(&w);
}

/* ---- Blocks (vllm 54359) ------------------------------------------------------------------------ */

/* The same tokens wherever they lie. */
static void fill_by_position(world *w)
{
    csa_tensor *inputs[] = {&w->query, &w->index_query, &w->index_weights, &w->gate};
    test_random q = random_of(8300, 0);
    for (int i = 0; i < COUNT_OF(inputs); i++)
        tensor_randomise(inputs[i], &q, 1);
    for (int64_t p = 0; p < w->lengths[0]; p++) {
        int64_t slot = world_slot(w, 0, p), size = w->shape.block_size;
        test_random r = random_of(8301, (uint64_t)p);
        for (int64_t g = 0; g < 2; g++)
            for (int i = 0; i < CSA_KV_SIZE; i++)
                tensor_put(&w->cache.kv, random_normal(&r), slot / size, g, slot % size, i);
        for (int i = 0; p % 8 == 0 && i < CSA_SUMMARY_SIZE; i++)
            tensor_put(&w->cache.summaries, random_normal(&r), slot / size, slot % size / 8, i, 0);
    }
}

static void test_block_sizes(void **state)
{
    (void)state;
    const int sizes[] = {16, 32, 64, 128};
    world first;
    for (int i = 0; i < 8; i++) {
        world w;
        world_shape shape = {.query_len = 3, .exact_length = 333, .groups = 2, .heads = 2, .topk = 9};
        shape.block_size = sizes[i % 4];
        shape.strided = i >= 4;
        world_make(&w, shape, 8300 + (uint64_t)i);
        fill_by_position(&w);
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(plain_context(), &step));
        if (i == 0) {
            first = w;
            continue;
        }
        tensor_expect_equal("out", &w.out, &first.out);
        tensor_expect_equal("lse", &w.lse, &first.lse);
        tensor_expect_equal("selected", &w.selected, &first.selected);
        world_end(&w);
    }
    world_end(&first);
}

/* ---- Alignment (vllm 41257) --------------------------------------------------------------------- */

/* Moves a tensor into memory that starts `offset` elements past an aligned address, with an odd pitch. */
static void shift(world *w, csa_tensor *t, int64_t offset, int64_t extra)
{
    csa_tensor moved = *t;
    int64_t reach = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        moved.stride[d] = reach + (d < t->ndim - 1 ? extra : 0);
        reach = moved.stride[d] * t->shape[d];
    }
    int64_t item = tensor_itemsize(t->dtype);
    buffer *b = arena_buffer(&w->memory, "shifted", (size_t)((reach + offset) * item));
    moved.data = b->data + offset * item;
    buffer_cover(b, &moved);
    tensor_copy(&moved, t);
    *t = moved;
}

/* Right bits, or an error that names the tensor. */
static void expect_shifted(const world *aligned, world *w, const char *name)
{
    csa_step_args step = world_step(w);
    csa_score_args score = world_score(w);
    csa_status status = csa_decode(plain_context(), &step);
    if (status == CSA_OK)
        status = csa_score(plain_context(), &score);
    if (status != CSA_OK) {
        expect_refused(status, CSA_ERROR_UNSUPPORTED, name, NULL);
        return;
    }
    tensor_expect_equal(name, &w->out, &aligned->out);
    tensor_expect_equal(name, &w->selected, &aligned->selected);
    expect_scores(&score);
}

static void test_alignment(void **state)
{
    (void)state;
    const int heads[] = {5, 12};
    const char *names[] = {"query",     "out",         "gate",    "scores", "cache.kv",
                           "summaries", "index query", "weights", "lse"};
    for (int i = 0; i < 2 * COUNT_OF(names); i++)
        for (int bytes = 2; bytes <= 8; bytes *= 2) {
            world aligned, w;
            world_shape shape = {.requests = 2, .groups = 2, .max_length = 70, .heads = heads[i % 2]};
            shape.kv_dtype = bytes == 4 ? CSA_E4M3 : CSA_BF16;
            world_make(&aligned, shape, 8400);
            world_make(&w, shape, 8400);
            csa_tensor *tensors[] = {&w.query,       &w.out,           &w.gate,
                                     &w.scores,      &w.cache.kv,      &w.cache.summaries,
                                     &w.index_query, &w.index_weights, &w.lse};
            csa_tensor *t = tensors[i / 2];
            int64_t item = tensor_itemsize(t->dtype);
            shift(&w, t, bytes < item ? 1 : bytes / item, bytes == 8 ? 0 : 1);
            csa_step_args step = world_step(&aligned);
            CHECK_OK(csa_decode(plain_context(), &step));
            expect_shifted(&aligned, &w, names[i / 2]);
            world_end(&aligned);
            world_end(&w);
        }
}

/* Half an element off is never right. */
static void test_misaligned_elements(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 2}, 8500);
    csa_tensor *tensors[] = {&w.query,           &w.out, &w.gate, &w.cache.kv, &w.lse, &w.step.positions,
                             &w.step.block_table};
    const char *names[] = {"query", "out", "gate", "cache.kv", "lse", "positions", "block_table"};
    for (int i = 0; i < COUNT_OF(tensors); i++) {
        csa_tensor kept = *tensors[i];
        tensors[i]->data = (char *)kept.data + tensor_itemsize(kept.dtype) / 2;
        csa_step_args step = world_step(&w);
        expect_refused(csa_decode(plain_context(), &step), CSA_ERROR_ARGUMENT, names[i], "aligned", NULL);
        *tensors[i] = kept;
    }
    world_end(&w);
}

/* ---- Beyond arithmetic -------------------------------------------------------------------------- */

static csa_status supported(csa_op op, const void *args)
{
    return csa_supported(plain_context(), op, args);
}

/* Extents and strides whose products do not fit 64 bits; no memory is behind them. */
static void test_huge_extents(void **state)
{
    (void)state;
    const int64_t sizes[] = {(int64_t)1 << 40, INT64_MAX, INT64_MIN, -1, (int64_t)1 << 62, INT64_MAX / 8};
    world w;
    world_make(&w, (world_shape){.requests = 2, .groups = 2}, 8600);
    csa_tensor *tensors[] = {&w.index_query,
                             &w.index_weights,
                             &w.query,
                             &w.gate,
                             &w.out,
                             &w.lse,
                             &w.cache.kv,
                             &w.cache.summaries,
                             &w.step.positions,
                             &w.step.block_table,
                             &w.step.slots,
                             &w.selected,
                             &w.scores,
                             &w.rows_out.positions,
                             &w.cache.ring,
                             &w.step.ring_base};
    for (int i = 0; i < COUNT_OF(tensors) * 4 * COUNT_OF(sizes) * 3; i++) {
        csa_tensor *t = tensors[i % COUNT_OF(tensors)], kept = *t;
        int extent = i / COUNT_OF(tensors) % 4, what = i / COUNT_OF(tensors) / 4 / COUNT_OF(sizes);
        int64_t size = sizes[i / COUNT_OF(tensors) / 4 % COUNT_OF(sizes)];
        if (what != 1)
            t->shape[extent] = size;
        if (what != 0)
            t->stride[extent] = size;
        if (what == 2)
            t->shape[(extent + 1) % 4] = size;
        csa_step_args step = world_step(&w);
        csa_score_args score = world_score(&w);
        csa_attend_args attend = world_attend(&w);
        csa_layer_args layer = world_layer(&w);
        step.regions = i % 2 ? 0 : step.regions;
        (void)supported(CSA_OP_DECODE, &step); /* refused or not: without overflow */
        (void)supported(CSA_OP_SCORE, &score);
        (void)supported(CSA_OP_ATTEND, &attend);
        (void)supported(CSA_OP_LAYER, &layer);
        *t = kept;
    }
    world_end(&w);
}

/* A table without columns has no memory and so any number of requests. */
static void test_many_requests(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 2}, 8700);
    w.step.block_table = csa_tensor_2d(NULL, CSA_I32, (int64_t)1 << 40, 0);
    w.step.ring_base = (csa_tensor){0};
    w.step.query_len = INT32_MAX;
    csa_step_args step = world_step(&w);
    expect_refused(csa_decode(plain_context(), &step), CSA_ERROR_ARGUMENT, "requests * query_len", NULL);
    int32_t length = 50;
    int64_t owners[] = {((int64_t)1 << 40) - 1, 0};
    w.step.seq_lens = csa_tensor_1d(&length, CSA_I32, (int64_t)1 << 40);
    w.step.seq_lens.stride[0] = 0; /* one length for all */
    w.step.positions = (csa_tensor){0};
    w.step.owners = csa_tensor_1d(owners, CSA_I64, 2);
    CHECK_OK(csa_decode(plain_context(), &step)); /* nobody sees anything: the table has no columns */
    CHECK(tensor_value(&w.lse, 0, 0, 0, 0) == -INFINITY);
    world_end(&w);
}

/* A descriptor that says it is small is read no further. */
static void test_short_descriptors(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 2}, 8800);
    size_t *cache = malloc(sizeof *cache), *tokens = malloc(sizeof *tokens);
    *cache = *tokens = sizeof *cache;
    csa_prepare_args prepare = w.prepare;
    prepare.cache = (const csa_cache *)(const void *)cache;
    CHECK_OK(csa_prepare(plain_context(), &prepare)); /* a cache without kv */
    csa_step_args step = world_step(&w);
    step.cache = prepare.cache;
    expect_refused(csa_decode(plain_context(), &step), CSA_ERROR_ARGUMENT, "cache.kv", NULL);
    step = world_step(&w);
    step.tokens = (const csa_tokens *)(const void *)tokens;
    expect_refused(csa_decode(plain_context(), &step), CSA_ERROR_ARGUMENT, "tokens.", NULL);
    free(cache);
    free(tokens);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topk),
        cmocka_unit_test(test_wide_lists),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_other_sizes),
        cmocka_unit_test(test_block_sizes),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_misaligned_elements),
        cmocka_unit_test(test_huge_extents),
        cmocka_unit_test(test_many_requests),
        cmocka_unit_test(test_short_descriptors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
