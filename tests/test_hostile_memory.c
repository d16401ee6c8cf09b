/*
 * Which memory counts: NaN wherever nothing may be read, rows that nobody writes, padding between writers,
 * batch mates, and a request's state moved elsewhere. SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

static int64_t *i64_at(const csa_tensor *t, int64_t i)
{
    return tensor_at(t, i, 0, 0, 0);
}

/* ---- NaN where nothing is read ------------------------------------------------------------------ */

/* Copies what a row attends to from one world's cache to its twin's. */
static void keep_row(const world *from, world *to, int64_t row)
{
    int64_t groups = from->shape.groups, size = from->shape.block_size, columns = from->selected.shape[1];
    seat s = spec_seat(&from->step, row / groups);
    size_t bytes = (size_t)(CSA_KV_SIZE * tensor_itemsize(from->cache.kv.dtype));
    for (int64_t i = 0; s.active && i < columns * CSA_REGION; i++) {
        int64_t region = *(int64_t *)tensor_at(&from->selected, row, i / CSA_REGION, 0, 0);
        int64_t p = region * CSA_REGION + i % CSA_REGION;
        if (region < 0 || p > s.position)
            continue;
        int64_t slot = world_slot(from, s.request, p);
        memcpy(tensor_at(&to->cache.kv, slot / size, row % groups, slot % size, 0),
               tensor_at(&from->cache.kv, slot / size, row % groups, slot % size, 0), bytes);
    }
}

/* The closed regions that a token ranks. */
static void keep_summaries(const world *from, world *to, int64_t token)
{
    seat s = spec_seat(&from->step, token);
    for (int64_t region = 0; s.active && region < s.position / CSA_REGION; region++) {
        int64_t at = world_slot(from, s.request, region * CSA_REGION) / CSA_REGION;
        int64_t per_block = from->shape.block_size / CSA_REGION;
        memcpy(tensor_at(&to->cache.summaries, at / per_block, at % per_block, 0, 0),
               tensor_at(&from->cache.summaries, at / per_block, at % per_block, 0, 0), CSA_SUMMARY_SIZE);
    }
}

/* Inputs of padding. */
static void spoil_inactive(world *w)
{
    csa_tensor *inputs[] = {&w->index_query, &w->index_weights, &w->query, &w->gate};
    for (int64_t t = 0; t < w->tokens; t++)
        for (int i = 0; i < COUNT_OF(inputs) && !spec_seat(&w->step, t).active; i++) {
            csa_tensor one = tensor_slice(*inputs[i], t, 1);
            tensor_set(&one, 0xFF);
        }
}

/* Regions that are not selected, tokens past the position, other requests' blocks, the current region's
 * summary, the ring, a padded token's inputs: all NaN, and no bit of the others changes. */
static void test_unread_cache(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        world a, b;
        world_shape shape = {
            .groups = 2, .heads = 2, .requests = 3, .query_len = 1 + draw % 3, .max_length = 150};
        shape.kv_dtype = draw % 2 ? CSA_E4M3 : CSA_BF16;
        shape.inactive = draw % 3 == 0;
        test_set_draw(draw);
        world_make(&a, shape, 4000 + (uint64_t)draw);
        world_make(&b, shape, 4000 + (uint64_t)draw);
        csa_step_args step = world_step(&a), spoiled = world_step(&b);
        CHECK_OK(csa_decode(plain_context(), &step));
        tensor_set(&b.cache.kv, 0xFF);
        tensor_set(&b.cache.summaries, 0xFF);
        tensor_set(&b.cache.ring, 0xFF);
        for (int64_t row = 0; row < a.rows; row++)
            keep_row(&a, &b, row);
        for (int64_t t = 0; t < a.tokens; t++)
            keep_summaries(&a, &b, t);
        spoil_inactive(&b);
        CHECK_OK(csa_decode(plain_context(), &spoiled));
        tensor_expect_equal("selected", &spoiled.selected, &step.selected);
        tensor_expect_equal("out", &spoiled.out, &step.out);
        tensor_expect_equal("lse", &spoiled.lse, &step.lse);
        world_end(&a);
        world_end(&b);
    }
}

/* Rows of the tables that belong to no token; a padded token's inputs. */
static void test_unread_rope(void **state)
{
    (void)state;
    world a, b;
    world_make(&a, (world_shape){.requests = 4, .max_length = 90, .groups = 2, .index_heads = 2}, 4100);
    world_make(&b, a.shape, 4100);
    *i64_at(&a.step.slots, 1) = *i64_at(&b.step.slots, 1) = -1;
    for (int64_t p = 0; p < b.prepare.rope.shape[0]; p++) {
        bool used = false;
        for (int64_t t = 0; t < 4; t++)
            used |= t != 1 && *i64_at(&b.step.positions, t) == p;
        csa_tensor row = tensor_slice(b.prepare.rope, p, 1), index = tensor_slice(b.prepare.index_rope, p, 1);
        tensor_set(&row, used ? *(uint8_t *)row.data : 0xFF);
        tensor_set(&index, used ? *(uint8_t *)index.data : 0xFF);
        if (used) {
            csa_tensor from = tensor_slice(a.prepare.rope, p, 1),
                       too = tensor_slice(a.prepare.index_rope, p, 1);
            tensor_copy(&row, &from);
            tensor_copy(&index, &too);
        }
    }
    csa_tensor spoiled = tensor_slice(b.prepare.query, 1, 1);
    tensor_set(&spoiled, 0xFF);
    CHECK_OK(csa_prepare(plain_context(), &a.prepare));
    CHECK_OK(csa_prepare(plain_context(), &b.prepare));
    tensor_expect_equal("kv", &b.cache.kv, &a.cache.kv);
    for (int64_t t = 0; t < 4; t++) {
        csa_tensor *got[] = {&b.prepare.query_out, &b.prepare.index_query_out, &b.prepare.index_key_out};
        csa_tensor *expected[] = {&a.prepare.query_out, &a.prepare.index_query_out, &a.prepare.index_key_out};
        for (int i = 0; i < 3 && t != 1; i++) {
            csa_tensor x = tensor_slice(*got[i], t, 1), y = tensor_slice(*expected[i], t, 1);
            tensor_expect_equal("prepared", &x, &y);
        }
    }
    world_end(&a);
    world_end(&b);
}

static void bf16_rows(const csa_tensor *t, int64_t row, int count, float *values)
{
    for (int i = 0; i < count; i++)
        values[i] = (float)tensor_value(t, row, i, 0, 0);
}

static void expect_summary(const world *w, int64_t slot, float rows[8][512])
{
    uint8_t expected[256], *got = tensor_at(&w->cache.summaries, slot / 16, slot % 16 / 8, 0, 0);
    spec_summary(rows, expected);
    for (int i = 0; i < 256; i++)
        CHECKF(got[i] == expected[i], "channel %d is 0x%02x, expected 0x%02x", i, got[i], expected[i]);
}

/* Ring rows that a closing region does not need are NaN, and so is the whole ring before a request starts. */
static void test_unread_ring(void **state)
{
    (void)state;
    for (int verify = 0; verify < 2; verify++) {
        world w;
        float rows[8][512];
        world_make(&w, (world_shape){.exact_length = 32, .ring_capacity = 19}, 4200 + (uint64_t)verify);
        tensor_set(&w.cache.ring, 0xFF);
        for (int64_t p = 16; p < 24; p++) {
            *i64_at(&w.step.positions, 0) = p;
            *i64_at(&w.step.slots, 0) = world_slot(&w, 0, p);
            tensor_randomise(&w.prepare.index_key_out, &w.random, 1);
            tensor_randomise(&w.z, &w.random, 1);
            bf16_rows(&w.prepare.index_key_out, 0, 256, rows[p - 16]);
            bf16_rows(&w.z, 0, 256, rows[p - 16] + 256);
            csa_summarize_args a = world_summarize(&w);
            CHECK_OK((verify ? csa_summarize_verify : csa_summarize_decode)(plain_context(), &a));
        }
        expect_summary(&w, world_slot(&w, 0, 23), rows);
        world_end(&w);
    }
}

/* Scores past the current region, and the current one's own, are nobody's business. */
static void test_unread_scores(void **state)
{
    (void)state;
    arena memory = {0};
    test_random r = random_of(4300, 0);
    const int64_t currents[] = {0, 7, 8, 9, 40, 63};
    csa_select_args a = {.size = sizeof a, .topk = 8};
    a.scores = arena_tensor(&memory, "scores", &r, CSA_F32, 2, 6, 64);
    a.current = ids_i64(&memory, "current", 6, currents);
    a.selected = arena_tensor(&memory, "selected", &r, CSA_I64, 2, 6, 9);
    for (int64_t row = 0; row < 6; row++) /* 0xFF is NaN */
        for (int64_t region = 0; region < 64; region++)
            if (region < currents[row] || row % 2)
                tensor_put(&a.scores, region < currents[row] ? random_normal(&r) : 1e30, row, region, 0, 0);
    CHECK_OK(csa_select(plain_context(), &a));
    expect_selected(&a);
    a.topk = 64; /* everything is selected: no score is read at all */
    a.scores.data = NULL;
    a.selected = arena_tensor(&memory, "all", &r, CSA_I64, 2, 6, 65);
    CHECK_OK(csa_select(plain_context(), &a));
    expect_selected(&a);
    arena_check(&memory);
    arena_free(&memory);
}

/* ---- Rows nobody writes (vllm PR 37442, ATOM PR 1595) ------------------------------------------- */

static void expect_zero(const csa_tensor *out, int64_t token)
{
    csa_tensor one = tensor_slice(*out, token, 1);
    for (int64_t g = 0; g < one.shape[1]; g++)
        for (int64_t h = 0; h < one.shape[2]; h++)
            for (int64_t i = 0; i < (one.ndim == 4 ? one.shape[3] : 1); i++)
                CHECK(*(uint16_t *)tensor_at(&one, 0, g, h, i) == 0);
}

static void test_rows_nobody_writes(void **state)
{
    (void)state;
    for (int threads = 1; threads < 18; threads += 8) {
        world w;
        csa_context *context =
            test_context((csa_context_options){.threads = threads, .parallel_for = pool_for});
        world_make(&w, (world_shape){.requests = 5, .groups = 2, .heads = 3, .exact_length = 77}, 4400);
        *i64_at(&w.step.slots, 1) = -1;
        *i64_at(&w.step.positions, 3) = -1;
        spoil_inactive(&w);
        csa_step_args step = world_step(&w);
        CHECK_OK(csa_decode(context, &step));
        expect_step(context, &step);
        for (int64_t token = 1; token < 5; token += 2) {
            expect_zero(&w.out, token);
            CHECK(tensor_value(&w.lse, token, 1, 2, 0) == -INFINITY);
        }
        csa_context_destroy(context);
        world_end(&w);
    }
}

static void test_gate_nobody_writes(void **state)
{
    (void)state;
    arena memory = {0};
    test_random r = random_of(4500, 0);
    csa_gate_args a = {.size = sizeof a};
    a.attention = arena_tensor(&memory, "attention", &r, CSA_BF16, 3, 5, 4, CSA_HEAD_SIZE);
    a.gate = arena_tensor(&memory, "gate", &r, CSA_BF16, 2, 5, 4); /* NaN */
    a.active = arena_tensor(&memory, "active", &r, CSA_BOOL, 1, 5);
    a.out = arena_tensor(&memory, "out", &r, CSA_BF16, 3, 5, 4, CSA_HEAD_SIZE);
    for (int64_t token = 0; token < 5; token++) {
        csa_tensor row = tensor_slice(a.attention, token, 1), gate = tensor_slice(a.gate, token, 1);
        *(uint8_t *)tensor_at(&a.active, token, 0, 0, 0) = token % 2 ? 0 : 2;
        if (token % 2)
            continue; /* attention and gate stay NaN */
        tensor_randomise(&row, &r, 1);
        tensor_randomise(&gate, &r, 3);
    }
    CHECK_OK(csa_gate(plain_context(), &a));
    for (int64_t n = 0; n < (int64_t)5 * 4 * CSA_HEAD_SIZE; n++) {
        int64_t token = n / 768, head = n / CSA_HEAD_SIZE % 4, i = n % CSA_HEAD_SIZE;
        double sigmoid = 1 / (1 + exp(-tensor_value(&a.gate, token, head, 0, 0)));
        double expected = tensor_value(&a.attention, token, head, i, 0) * (double)bf16_rounded((float)sigmoid);
        double got = tensor_value(&a.out, token, head, i, 0);
        CHECK(token % 2 ? got == 0 : got == (double)bf16_rounded((float)expected));
    }
    arena_check(&memory);
    arena_free(&memory);
}

/* ---- Writers among padding (TensorRT-LLM PR 18673, vllm PR 57317) ------------------------------- */

static void write_among_padding(int64_t offset, int form)
{
    world w;
    const int64_t slots[] = {offset, -1, -1, 16 + offset};
    const int64_t positions[] = {offset, INT32_MAX, -7, 16 + offset};
    const int32_t starts[] = {0, 1, 2, 3, 4};
    world_make(&w, (world_shape){.requests = 4, .exact_length = 40, .groups = 2, .strided = true}, 4600);
    memset(tensor_at(&w.step.block_table, 0, 0, 0, 0), 0, 4);
    for (int i = 0; i < 4; i++) {
        *i64_at(&w.step.slots, i) = slots[i];
        *i64_at(&w.step.positions, i) = positions[i];
    }
    w.step.query_start = ids_i32(&w.memory, "query_start", 5, starts);
    csa_tensor kv = copy_of(&w.memory, &w.cache.kv), ring = copy_of(&w.memory, &w.cache.ring),
               summaries = copy_of(&w.memory, &w.cache.summaries);
    csa_summarize_args a = world_summarize(&w);
    CHECK_OK(csa_prepare(plain_context(), &w.prepare));
    CHECK_OK(form == 0   ? csa_summarize_decode(plain_context(), &a)
             : form == 1 ? csa_summarize_verify(plain_context(), &a)
                         : csa_summarize_prefill(plain_context(), &a));
    int64_t kv_rows[] = {offset, 16 + offset, 2 * 16 + offset, 3 * 16 + offset}; /* [block, group, offset] */
    int64_t ring_rows[2], regions[] = {0, 2};
    bool closing = offset % 8 == 7;
    for (int i = 0; i < 2; i++)
        ring_rows[i] = *i64_at(&w.step.ring_base, i * 3) + positions[i * 3] % w.cache.ring_capacity;
    expect_rows_written("kv", &kv, &w.cache.kv, 4, kv_rows);
    expect_rows_written("ring", &ring, &w.cache.ring, closing && form == 0 ? 0 : 2, ring_rows);
    expect_rows_written("summaries", &summaries, &w.cache.summaries, closing ? 2 : 0, regions);
    world_end(&w);
}

static void test_writers_among_padding(void **state)
{
    (void)state;
    for (int form = 0; form < 3; form++) {
        write_among_padding(5, form);
        write_among_padding(7, form);
    }
}

/* ---- Batch mates (FlashMLA 212, vllm 53257) ----------------------------------------------------- */

/* The first n requests of a world. */
static void first_requests(const world *w, int64_t n, csa_tokens *tokens, csa_step_args *step)
{
    tokens->block_table = tensor_slice(w->step.block_table, 0, n);
    tokens->slots = tensor_slice(w->step.slots, 0, n);
    tokens->positions = tensor_slice(w->step.positions, 0, n);
    tokens->ring_base = tensor_slice(w->step.ring_base, 0, n);
    step->tokens = tokens;
    csa_tensor *all[] = {&step->index_query, &step->index_weights, &step->query,
                         &step->gate,        &step->out,           &step->lse};
    for (int i = 0; i < COUNT_OF(all); i++)
        *all[i] = tensor_slice(*all[i], 0, n);
    step->selected = tensor_slice(step->selected, 0, n * w->shape.groups);
    step->rows_out = NULL;
}

static void test_batch_mates(void **state)
{
    (void)state;
    const int64_t batches[] = {1, 9, 65, 129};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world w;
        world_shape shape = {.requests = 129, .groups = 2, .heads = 3, .max_length = 120, .topk = 6};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        world_make(&w, shape, 4700);
        csa_tensor out = {0}, selected = {0};
        for (int i = 0; i < 4; i++) {
            csa_step_args step = world_step(&w);
            csa_tokens tokens = w.step;
            first_requests(&w, batches[i], &tokens, &step);
            CHECK_OK(csa_decode(plain_context(), &step));
            csa_tensor row = tensor_slice(step.out, 0, 1), list = tensor_slice(step.selected, 0, 2);
            if (i == 0) {
                out = copy_of(&w.memory, &row);
                selected = copy_of(&w.memory, &list);
            }
            tensor_expect_equal("out of the first row", &row, &out);
            tensor_expect_equal("its regions", &list, &selected);
        }
        world_end(&w);
    }
}

/* ---- A request moves (TensorRT-LLM PR 16197) ---------------------------------------------------- */

enum { KV = 1, SUMMARIES = 2, RING = 4, ALL = 7, FIRST = 33, END = 48 };

/* Decodes the tokens [first, end) of one request with csa_layer; the outputs of all in `out`. */
static void decode_tokens(world *w, int64_t first, int64_t end, csa_tensor *out)
{
    csa_layer_args layer = world_layer(w);
    layer.regions = END / CSA_REGION;
    layer.rows_out = NULL;
    for (int64_t p = first; p < end; p++) {
        *i64_at(&w->step.positions, 0) = p;
        *i64_at(&w->step.slots, 0) = world_slot(w, 0, p);
        token_inputs(w, 0, (uint64_t)p);
        CHECK_OK(csa_layer(plain_context(), NULL, &layer));
        csa_tensor row = tensor_slice(*out, p, 1);
        tensor_copy(&row, &w->out);
    }
}

static void make_movable(world *w)
{
    world_make(w, (world_shape){.exact_length = 41, .topk = 2, .heads = 2, .groups = 2, .ring_capacity = 11},
               4800);
    csa_context_options options = test_options((csa_context_options){0});
    csa_serving serving = world_serving(w);
    serving.regions = END / CSA_REGION; /* more than the world has now */
    CHECK_OK(csa_workspace_size(&options, &serving, &w->workspace.bytes));
    w->workspace.data = arena_buffer(&w->memory, "larger workspace", w->workspace.bytes)->data;
    csa_tensor view = csa_tensor_1d(w->workspace.data, CSA_U8, (int64_t)w->workspace.bytes);
    buffer_cover(w->memory.first, &view);
    w->cache.ring = arena_tensor(&w->memory, "wide ring", NULL, CSA_BF16, 2, 40, CSA_RING_SIZE);
}

/* Gives a twin the state of a request in other blocks and other ring rows, but for what is left out. */
static void move(const world *from, world *to, int what)
{
    int64_t base = *i64_at(&from->step.ring_base, 0), capacity = from->cache.ring_capacity;
    tensor_set(&to->cache.kv, 0xFF);
    tensor_set(&to->cache.summaries, 0xFF);
    tensor_set(&to->cache.ring, 0xFF);
    for (int64_t column = 0; column < END / 16; column++) {
        int32_t old = *(int32_t *)tensor_at(&from->step.block_table, 0, column, 0, 0);
        int32_t new = (int32_t)((old + 1) % from->blocks);
        *(int32_t *)tensor_at(&to->step.block_table, 0, column, 0, 0) = new;
        csa_tensor x = tensor_slice(to->cache.kv, new, 1), y = tensor_slice(from->cache.kv, old, 1);
        if (what & KV)
            tensor_copy(&x, &y);
        x = tensor_slice(to->cache.summaries, new, 1);
        y = tensor_slice(from->cache.summaries, old, 1);
        if (what & SUMMARIES)
            tensor_copy(&x, &y);
    }
    *i64_at(&to->step.ring_base, 0) = 29 - base;
    csa_tensor x = tensor_slice(to->cache.ring, 29 - base, capacity);
    csa_tensor y = tensor_slice(from->cache.ring, base, capacity);
    if (what & RING)
        tensor_copy(&x, &y);
}

static void test_move(void **state)
{
    (void)state;
    world stay, go;
    make_movable(&stay);
    csa_tensor expected = arena_tensor(&stay.memory, "expected", NULL, CSA_BF16, 4, END, 2, 2, CSA_HEAD_SIZE);
    decode_tokens(&stay, 0, FIRST + 1, &expected);
    const int moves[] = {ALL, ALL - KV, ALL - SUMMARIES, ALL - RING};
    for (int i = 0; i < 4; i++) {
        make_movable(&go);
        csa_tensor got = arena_tensor(&go.memory, "got", NULL, CSA_BF16, 4, END, 2, 2, CSA_HEAD_SIZE);
        move(&stay, &go, moves[i]);
        decode_tokens(&go, FIRST + 1, END, &got);
        if (i == 0) { /* stays as it was until here */
            world rest;
            make_movable(&rest);
            csa_tensor all = arena_tensor(&rest.memory, "all", NULL, CSA_BF16, 4, END, 2, 2, CSA_HEAD_SIZE);
            decode_tokens(&rest, 0, END, &all);
            tensor_copy(&expected, &all);
            world_end(&rest);
        }
        csa_tensor x = tensor_slice(got, FIRST + 1, END - FIRST - 1);
        csa_tensor y = tensor_slice(expected, FIRST + 1, END - FIRST - 1);
        if (i == 0)
            tensor_expect_equal("out after the move", &x, &y);
        CHECKF(i == 0 || !tensor_equal(&x, &y), "nothing changed with %d alone", moves[i]);
        world_end(&go);
    }
    world_end(&stay);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unread_cache),
        cmocka_unit_test(test_unread_rope),
        cmocka_unit_test(test_unread_ring),
        cmocka_unit_test(test_unread_scores),
        cmocka_unit_test(test_rows_nobody_writes),
        cmocka_unit_test(test_gate_nobody_writes),
        cmocka_unit_test(test_writers_among_padding),
        cmocka_unit_test(test_batch_mates),
        cmocka_unit_test(test_move),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
