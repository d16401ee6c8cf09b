/*
 * The cuda back end on what is large: more rows than a grid's y and z may have, blocks past 2^31 bytes, rows
 * that are selected from level by level. Part of test_cuda. SPDX-License-Identifier: Apache-2.0
 */
#include "cuda_twin.h"

/* ---- Many rows ---------------------------------------------------------------------------------- */

enum { MANY = 70000 }; /* more than a grid's y and z may have */

static csa_tensor repeated(csa_tensor t, int64_t count)
{
    t.shape[0] = count;
    t.stride[0] = 0;
    return t;
}

/* MANY times the rows of an output without gaps. */
static csa_tensor many_of(csa_tensor t)
{
    size_t bytes = (size_t)(tensor_count(&t) * tensor_itemsize(t.dtype)) * MANY;
    t.shape[0] *= MANY;
    t.data = allocate(bytes);
    CHECK_CUDA(cudaMemset(t.data, 0xFF, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    return t;
}

/* Every piece is what a call for one token wrote; frees it. */
static void expect_all_equal(const char *name, csa_tensor many, const csa_tensor *one)
{
    size_t bytes = (size_t)(tensor_count(one) * tensor_itemsize(one->dtype));
    uint8_t *got = malloc(MANY * bytes), *expected = malloc(bytes);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, many.data, MANY * bytes, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(expected, one->data, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < MANY; i++)
        CHECKF(memcmp(got + i * bytes, expected, bytes) == 0, "%s of token %zu", name, i);
    free(got);
    free(expected);
    CHECK_CUDA(cudaFree(many.data));
}

static csa_tokens repeated_tokens(const twin *t, int64_t count)
{
    csa_tokens k = t->device.step;
    k.block_table = repeated(k.block_table, count);
    k.positions = repeated(k.positions, count);
    k.slots.ndim = k.ring_base.ndim = 0;
    return k;
}

void decode_takes_many_rows(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 300, .groups = 2, .heads = 4}, 76);
    CHECK_OK(queue(DECODE, &t));
    csa_tokens tokens = repeated_tokens(&t, MANY);
    csa_step_args step = world_step(&t.device);
    csa_tensor *inputs[] = {&step.index_query, &step.index_weights, &step.query, &step.gate};
    for (int i = 0; i < 4; i++)
        *inputs[i] = repeated(*inputs[i], MANY);
    step.tokens = &tokens;
    step.rows_out = NULL;
    step.out = many_of(step.out);
    step.lse = many_of(step.lse);
    step.selected = many_of(step.selected);
    step.stream = stream;
    csa_serving serving = world_serving(&t.host);
    serving.decode_tokens = MANY;
    step.workspace = make_workspace(&serving);
    CHECK_OK(csa_decode(context, &step));
    expect_all_equal("out", step.out, &t.device.out);
    expect_all_equal("lse", step.lse, &t.device.lse);
    expect_all_equal("selected", step.selected, &t.device.selected);
    CHECK_CUDA(cudaFree(step.workspace.data));
    end_twin(&t);
}

/* Rows of an output that nobody will touch. */
static csa_tensor untouched(csa_tensor t, int64_t count)
{
    t.shape[0] = count;
    return t;
}

static void expect_too_many_rows(csa_status status)
{
    char text[200];
    CHECK(status == CSA_ERROR_UNSUPPORTED);
    csa_last_error(text, sizeof text);
    CHECKF(strstr(text, "2^31 - 1 rows") != NULL, "%s", text);
}

/* Kernels count rows in 32 bits, and a grid has fewer than 2^31 blocks. */
void too_many_rows_are_refused(void **state)
{
    (void)state;
    twin t;
    make_twin(&t, (world_shape){.exact_length = 300, .groups = 2, .heads = 4}, 77);
    const int64_t counts[] = {(int64_t)1 << 30, ((int64_t)1 << 32) + 1}; /* two groups each */
    for (int i = 0; i < 2; i++) {
        int64_t count = counts[i];
        csa_tokens tokens = repeated_tokens(&t, count);
        csa_score_args score = world_score(&t.device);
        score.tokens = &tokens;
        score.rows_out = NULL;
        score.query = repeated(score.query, count);
        score.weights = repeated(score.weights, count);
        score.scores = untouched(score.scores, 2 * count);
        expect_too_many_rows(csa_score(context, &score));
        csa_select_args select = world_select(&t.device);
        select.scores = repeated(select.scores, 2 * count);
        select.current = repeated(select.current, 2 * count);
        select.selected = untouched(select.selected, 2 * count);
        expect_too_many_rows(csa_select(context, &select));
        csa_attend_args attend = world_attend(&t.device);
        attend.tokens = &tokens;
        attend.rows = NULL;
        attend.query = repeated(attend.query, count);
        attend.selected = repeated(attend.selected, 2 * count);
        attend.gate = repeated(attend.gate, count);
        attend.out = untouched(attend.out, count);
        attend.lse = untouched(attend.lse, count);
        expect_too_many_rows(csa_attend(context, &attend));
        csa_gate_args gate = {.size = sizeof gate};
        gate.attention = csa_tensor_3d(attend.out.data, CSA_BF16, count, 8, CSA_HEAD_SIZE);
        gate.gate = csa_tensor_2d(attend.gate.data, CSA_BF16, count, 8);
        gate.out = gate.attention;
        expect_too_many_rows(csa_gate(context, &gate));
        csa_step_args step = world_step(&t.device);
        step.tokens = &tokens;
        step.rows_out = NULL;
        step.index_query = score.query;
        step.index_weights = score.weights;
        step.query = attend.query;
        step.gate = attend.gate;
        step.out = attend.out;
        step.lse = attend.lse;
        step.selected = select.selected;
        step.workspace.bytes = SIZE_MAX; /* refused before any of it is touched */
        expect_too_many_rows(csa_decode(context, &step));
    }
    end_twin(&t);
}

void stages_take_many_rows(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 300, .groups = 2, .heads = 4}, 77);
    world *w = &t.device;
    csa_tokens tokens = repeated_tokens(&t, MANY);
    csa_score_args score = world_score(w), scores = score;
    csa_select_args select = world_select(w), selects;
    csa_attend_args attend = world_attend(w), attends = attend;
    score.stream = scores.stream = select.stream = attend.stream = attends.stream = stream;
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    CHECK_OK(csa_attend(context, &attend));
    scores.tokens = attends.tokens = &tokens;
    scores.query = repeated(score.query, MANY);
    scores.weights = repeated(score.weights, MANY);
    csa_rows rows = {.size = sizeof rows, .current = many_of(w->rows_out.current)};
    scores.rows_out = &rows;
    scores.scores = many_of(score.scores);
    CHECK_OK(csa_score(context, &scores));
    selects = select;
    selects.scores = scores.scores;
    selects.current = rows.current;
    selects.selected = many_of(select.selected);
    CHECK_OK(csa_select(context, &selects));
    attends.query = repeated(attend.query, MANY);
    attends.gate = repeated(attend.gate, MANY);
    attends.selected = selects.selected;
    attends.out = many_of(attend.out);
    attends.lse = many_of(attend.lse);
    CHECK_OK(csa_attend(context, &attends));
    CHECK_CUDA(cudaFree(scores.scores.data)); /* entries past a row's length are unspecified */
    expect_all_equal("current", rows.current, &w->rows_out.current);
    expect_all_equal("selected", selects.selected, &w->selected);
    expect_all_equal("out", attends.out, &w->out);
    expect_all_equal("lse", attends.lse, &w->lse);
    end_twin(&t);
}

void prepare_takes_many_tokens(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 100, .heads = 2}, 78);
    csa_prepare_args one = t.device.prepare, many = one;
    csa_tokens tokens = repeated_tokens(&t, MANY);
    csa_tensor *inputs[] = {&many.index_query, &many.index_key, &many.index_weights,
                            &many.query,       &many.key,       &many.value};
    csa_tensor *outputs[] = {&many.index_query_out, &many.index_key_out, &many.index_weights_out,
                             &many.query_out,       &many.key_out,       &many.value_out};
    const csa_tensor *expected[] = {&one.index_query_out, &one.index_key_out, &one.index_weights_out,
                                    &one.query_out,       &one.key_out,       &one.value_out};
    for (int i = 0; i < 6; i++) {
        *inputs[i] = repeated(*inputs[i], MANY);
        *outputs[i] = many_of(*outputs[i]);
    }
    one.cache = many.cache = NULL;
    many.tokens = &tokens;
    CHECK_OK(csa_prepare(context, &one));
    CHECK_OK(csa_prepare(context, &many));
    for (int i = 0; i < 6; i++)
        expect_all_equal("an output of prepare", *outputs[i], expected[i]);
    end_twin(&t);
}

/* ---- Far blocks --------------------------------------------------------------------------------- */

/* Copies a cache's blocks between two views. */
static void copy_blocks(csa_tensor to, csa_tensor from)
{
    for (int64_t block = 0; block < to.shape[0]; block++) {
        csa_tensor a = tensor_slice(to, block, 1), b = tensor_slice(from, block, 1);
        CHECK_CUDA(cudaMemcpy(a.data, b.data, (size_t)(tensor_count(&a) * tensor_itemsize(a.dtype)),
                              cudaMemcpyDeviceToDevice));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
}

static int64_t block_bytes(const csa_tensor *t)
{
    return tensor_count(t) / t->shape[0] * tensor_itemsize(t->dtype);
}

/* The cache's blocks, each with its summaries, `stride` bytes apart. */
static csa_cache make_far(const csa_cache *near, char *memory, int64_t stride)
{
    csa_cache far = *near;
    far.kv.data = memory;
    far.kv.stride[0] = stride / tensor_itemsize(far.kv.dtype);
    far.summaries.data = memory + block_bytes(&near->kv);
    far.summaries.stride[0] = stride;
    copy_blocks(far.kv, near->kv);
    copy_blocks(far.summaries, near->summaries);
    return far;
}

void blocks_may_lie_far_apart(void **state)
{
    (void)state;
    skip_if_quick();
    const int64_t stride = ((int64_t)1 << 31) + 4096;
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = 2, .groups = 2, .heads = 3, .exact_length = 45, .query_len = 2};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin a, b;
        make_twin(&a, shape, 79);
        make_twin(&b, shape, 79);
        csa_cache near = b.device.cache;
        size_t free_bytes, all, needed = (size_t)(stride * near.kv.shape[0]);
        CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all));
        if (free_bytes < needed) {
            print_message("skipped: %zu bytes of device memory are free, %zu are needed\n", free_bytes, needed);
            end_twin(&a);
            end_twin(&b);
            skip();
        }
        char *memory = allocate(needed);
        b.device.cache = make_far(&near, memory, stride);
        CHECK_OK(queue(LAYER, &a));
        CHECK_OK(queue(LAYER, &b));
        CHECK_CUDA(cudaDeviceSynchronize());
        copy_blocks(near.kv, b.device.cache.kv);
        copy_blocks(near.summaries, b.device.cache.summaries);
        CHECK_CUDA(cudaFree(memory));
        to_host(&a);
        to_host(&b);
        arena_expect_equal(&b.host.memory, &a.host.memory, NULL);
        end_twin(&a);
        end_twin(&b);
    }
}

/* ---- Long rows ---------------------------------------------------------------------------------- */

enum { SCORE_SORTS = 6 };

/* Scores of all magnitudes; few values; one; hardly any but NaN; half of them 0; a large and a small one beside
 * each other, here and there. */
static float draw_score(test_random *r, int sort, int64_t at)
{
    float x = (float)random_normal(r);
    switch (sort) {
    case 0:
        return random_chance(r, 80) ? x : x * 1e20F;
    case 1:
        return (float)random_between(r, 0, 2);
    case 2:
        return -1.5F;
    case 3:
        return random_chance(r, 1) ? x : NAN;
    case 5:
        if (at >= 513 * 32 || (at % 64 != 31 && at % 64 != 32))
            return x - 50;
        return (at % 64 == 31 ? 100.0F : 2.0F) + (at < 128 ? 0.0F : 1e-4F * (float)at);
    default:
        return x > 0 ? x : 0;
    }
}

static void *to_new_memory(const void *from, size_t bytes)
{
    void *memory = allocate(bytes);
    CHECK_CUDA(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    return memory;
}

enum { MOST_ROWS = 12 };

static void expect_selection(csa_context *ref, int rows, int64_t regions, int64_t topk, int sort)
{
    test_random r = random_of((uint64_t)(regions * 8 + sort), (uint64_t)topk);
    size_t score_bytes = (size_t)(rows * regions) * sizeof(float),
           bytes = (size_t)(rows * (topk + 1)) * sizeof(int64_t);
    float *scores = malloc(score_bytes);
    int64_t *expected = malloc(bytes), *got = malloc(bytes), current[MOST_ROWS];
    for (int64_t i = 0; i < rows * regions; i++)
        scores[i] = draw_score(&r, sort, i % regions);
    for (int row = 0; row < rows; row++) /* the second has no more than it may select */
        current[row] = row == 0 ? regions - 1 : random_between(&r, topk, row == 1 ? topk : regions - 1);
    csa_select_args args = {
        .size = sizeof args,
        .scores = csa_tensor_2d(scores, CSA_F32, rows, regions),
        .current = csa_tensor_1d(current, CSA_I64, rows),
        .selected = csa_tensor_2d(expected, CSA_I64, rows, topk + 1),
        .topk = topk,
    };
    CHECK_OK(csa_select(ref, &args));
    args.scores.data = to_new_memory(scores, score_bytes);
    args.current.data = to_new_memory(current, (size_t)rows * sizeof *current);
    args.selected.data = allocate(bytes);
    args.stream = stream;
    CHECK_OK(csa_select(context, &args));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, args.selected.data, bytes, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < rows * (topk + 1); i++)
        CHECKF(got[i] == expected[i], "%d rows of %d regions, topk %d, sort %d: entry %d is %d, expected %d",
               rows, (int)regions, (int)topk, sort, (int)i, (int)got[i], (int)expected[i]);
    CHECK_CUDA(cudaFree(args.scores.data));
    CHECK_CUDA(cudaFree(args.current.data));
    CHECK_CUDA(cudaFree(args.selected.data));
    free(scores);
    free(expected);
    free(got);
}

/* Past 8192 regions blocks are larger; from 16,384 on few rows have clusters of 8, past 65,536 of 16, where
 * more rows have some, too; past 131,072 peaks are searched first, and peaks of peaks. */
void long_rows_are_selected(void **state)
{
    (void)state;
    const struct {
        int rows, regions;
    } shapes[] = {{3, 8193},   {3, 16385},  {6, 70001},  {12, 65536},
                  {3, 131073}, {12, 40001}, {3, 150000}, {3, 300000}};
    csa_context *ref = test_context((csa_context_options){.backend = CSA_BACKEND_REF});
    for (int i = 0; i < (test_quick() ? 3 : 8); i++)
        for (int sort = 0; sort < SCORE_SORTS; sort += test_quick() ? 4 : 1) {
            expect_selection(ref, shapes[i].rows, shapes[i].regions, 512, sort);
            if (test_quick())
                continue;
            expect_selection(ref, shapes[i].rows, shapes[i].regions, 1, sort);
            expect_selection(ref, shapes[i].rows, shapes[i].regions, 1024, sort);
        }
    csa_context_destroy(ref);
}

/* A step whose requests end after `percent` of their tokens, in a workspace that larger scores fill. */
static void expect_step_like_stages(world_shape shape, int percent)
{
    twin t;
    make_twin(&t, shape, 79);
    set_lengths(&t.host, percent);
    to_device(&t);
    spoil_workspace(&t, 0x7E);
    csa_score_args score = world_score(&t.device);
    csa_select_args select = world_select(&t.device);
    CHECK_OK(queue(DECODE, &t));
    to_host(&t);
    csa_tensor selected = t.host.selected;
    selected.data = malloc((size_t)(tensor_count(&selected) * 8));
    memcpy(selected.data, t.host.selected.data, (size_t)(tensor_count(&selected) * 8));
    score.stream = select.stream = stream;
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    to_host(&t);
    tensor_expect_equal("selected", &selected, &t.host.selected);
    free(selected.data);
    end_twin(&t);
}

/* Rows that end where the scratch does; and 2, 3 and 1 regions behind a whole group of 8 (72,000, 140,000 and
 * 540,000 tokens), behind which is what longer rows left. */
static void expect_steps_like_stages(world_shape shape)
{
    const int percents[] = {100, 93, 91};
    for (int i = 0; i < 3; i++)
        expect_step_like_stages(shape, percents[i]);
}

/* In a step, score finds peaks, unless rows have clusters (see above): of more than 8192 regions where rows are
 * few, of more than 16,384 always; past 65,536 blocks are larger. */
void long_steps_select_like_stages(void **state)
{
    (void)state;
    skip_if_quick();
    world_shape shape = {.requests = 2, .query_len = 2, .topk = 512, .block_size = 128, .kv_dtype = CSA_E4M3};
    const struct {
        int length, drafts;
    } steps[] = {{72000, 2}, {140000, 2}, {140000, 8}, {540000, 2}, {540000, 3}, {540000, 5}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        shape.exact_length = steps[i].length;
        shape.query_len = steps[i].drafts;
        expect_steps_like_stages(shape);
        shape.requests = 1;
    }
    shape.exact_length = 72000;
    shape.query_len = 33; /* 264 rows */
    shape.groups = 8;
    shape.heads = 1;
    expect_steps_like_stages(shape);
}
