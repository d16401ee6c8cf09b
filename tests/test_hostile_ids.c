/*
 * Bad ids that a specification gives a meaning: what SPEC.md says comes out, and in checking mode they are
 * refused by name before anything is written. test_hostile_junk.c has those that only must do no harm.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

static int64_t *i64_at(const csa_tensor *t, int64_t i)
{
    return tensor_at(t, i, 0, 0, 0);
}

static int32_t *block_at(world *w, int64_t request, int64_t column)
{
    return tensor_at(&w->step.block_table, request, column, 0, 0);
}

/* The step in checking mode: refused, nothing written. */
static void expect_step_refused(world *w, const csa_step_args *step, const char *word)
{
    uint8_t *before = arena_snapshot(&w->memory);
    expect_refused(csa_decode(checking_context(), step), CSA_ERROR_ID, word, NULL);
    CHECK(arena_unchanged(&w->memory, before));
    free(before);
}

static void run_and_compare(world *w)
{
    csa_step_args step = world_step(w);
    CHECK_OK(csa_decode(plain_context(), &step));
    expect_step(plain_context(), &step);
}

static world_shape small(int draw)
{
    return (world_shape){.groups = 1 + draw % 3,
                         .heads = 2,
                         .requests = 3,
                         .query_len = 1 + draw % 2,
                         .block_size = draw % 2 ? 32 : 16,
                         .max_length = 260,
                         .kv_dtype = draw % 3 ? CSA_BF16 : CSA_E4M3,
                         .strided = draw % 2 == 0};
}

/* ---- Block tables (vllm 54359, 42494) ----------------------------------------------------------- */

/* Entries inside the live part that name no block: their regions score 0 and have no token. */
static void test_bad_blocks(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        world w;
        test_set_draw(draw);
        world_make(&w, small(draw), 100 + (uint64_t)draw);
        const int32_t bad[] = {-1, (int32_t)w.blocks, INT32_MAX, INT32_MIN, (int32_t)w.blocks + 1, -2};
        for (int64_t request = 0; request < w.shape.requests; request++)
            for (int i = 0; i < 3; i++) {
                int64_t last = (w.lengths[request] - 1) / w.shape.block_size;
                *block_at(&w, request, random_between(&w.random, 0, last)) = bad[(draw + i) % 6];
            }
        run_and_compare(&w);
        csa_step_args step = world_step(&w);
        expect_step_refused(&w, &step, "block_table");
        world_end(&w);
    }
}

/* A table with fewer columns than positions need; what lies behind its rows is not the table. */
static void test_narrow_table(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        world w;
        test_set_draw(draw);
        world_make(&w, small(draw), 200 + (uint64_t)draw);
        int64_t columns = random_between(&w.random, 0, 3);
        for (int64_t request = 0; request < w.shape.requests; request++)
            for (int64_t column = columns; column < w.columns; column++)
                *block_at(&w, request, column) = 0; /* a block, but not theirs */
        w.step.block_table.shape[1] = columns;
        run_and_compare(&w);
        world_end(&w);
    }
}

/* A table exactly wide enough, junk behind it, gives the bits of a wide one. */
static void test_exact_table(void **state)
{
    (void)state;
    world wide, exact;
    world_make(&wide, (world_shape){.requests = 1, .exact_length = 160, .groups = 2}, 300);
    world_make(&exact, wide.shape, 300);
    exact.step.block_table.shape[1] = 160 / 16;
    csa_step_args a = world_step(&wide), b = world_step(&exact);
    CHECK_OK(csa_decode(plain_context(), &a));
    CHECK_OK(csa_decode(checking_context(), &b));
    tensor_expect_equal("out", &b.out, &a.out);
    tensor_expect_equal("selected", &b.selected, &a.selected);
    world_end(&wide);
    world_end(&exact);
}

/* ---- Positions, owners, lengths ----------------------------------------------------------------- */

static void test_positions(void **state)
{
    (void)state;
    const int64_t positions[] = {INT64_MAX, INT64_MIN,     -1, INT32_MAX,    (int64_t)1 << 40, 0,
                                 7,         INT64_MAX - 7, -7, INT64_MAX - 8};
    world w;
    world_make(&w, (world_shape){.requests = 10, .exact_length = 100, .groups = 2, .strided = true}, 400);
    for (int i = 0; i < 10; i++)
        *i64_at(&w.step.positions, i) = positions[i];
    csa_step_args step = world_step(&w);
    CHECK_OK(csa_decode(plain_context(), &step));
    step.rows_out = NULL; /* lengths of such positions do not fit 32 bits */
    expect_step(plain_context(), &step);
    expect_step_refused(&w, &step, "tokens.positions[0] is 9223372036854775807");
    world_end(&w);
}

static void test_owners(void **state)
{
    (void)state;
    const int64_t owners[] = {-1, 6, INT64_MAX, INT64_MIN, 2, 2};
    world w;
    world_make(&w, (world_shape){.requests = 6, .exact_length = 90, .groups = 2}, 500);
    w.step.owners = ids_i64(&w.memory, "owners", 6, owners);
    run_and_compare(&w);
    csa_step_args step = world_step(&w);
    expect_step_refused(&w, &step, "owner of token");
    for (int i = 0; i < 4; i++) /* ids of padding may be anything */
        *i64_at(&w.step.slots, i) = -1;
    CHECK_OK(csa_decode(checking_context(), &step));
    expect_step(plain_context(), &step);
    world_end(&w);
}

/* Requests without tokens, and tokens past the last query_start, which belong to none. */
static void test_query_start(void **state)
{
    (void)state;
    const int32_t starts[] = {0, 0, 2, 2, 5, 5, 6};
    world w;
    world_make(&w, (world_shape){.requests = 6, .query_len = 2, .exact_length = 90, .groups = 2}, 600);
    w.step.query_start = ids_i32(&w.memory, "query_start", 7, starts);
    w.step.query_len = 3;
    run_and_compare(&w);
    csa_step_args step = world_step(&w);
    expect_step_refused(&w, &step, "owner of token");
    world_end(&w);
}

/* Lengths said by request: 0, fewer than the drafts, negative, huge. */
static void test_seq_lens(void **state)
{
    (void)state;
    const int32_t lengths[] = {0, 2, 1, INT32_MAX, INT32_MIN, -1, 90};
    world w;
    world_make(&w, (world_shape){.requests = 7, .query_len = 3, .exact_length = 90, .groups = 2}, 700);
    w.step.positions = (csa_tensor){0};
    w.step.seq_lens = ids_i32(&w.memory, "seq_lens", 7, lengths);
    run_and_compare(&w);
    csa_step_args step = world_step(&w);
    expect_step_refused(&w, &step, "seq_lens");
    world_end(&w);
}

/* ---- Lists of regions --------------------------------------------------------------------------- */

static void test_currents(void **state)
{
    (void)state;
    const int64_t currents[] = {INT64_MAX, INT64_MIN, -1, -2, 40, 39, 0, 1};
    arena memory = {0};
    test_random r = random_of(800, 0);
    csa_select_args a = {.size = sizeof a, .topk = 5};
    a.scores = arena_tensor(&memory, "scores", &r, CSA_F32, 2, 8, 40);
    tensor_randomise(&a.scores, &r, 1);
    a.current = ids_i64(&memory, "current", 8, currents);
    a.selected = arena_tensor(&memory, "selected", &r, CSA_I64, 2, 8, 6);
    CHECK_OK(csa_select(plain_context(), &a));
    expect_selected(&a);
    expect_refused(csa_select(checking_context(), &a), CSA_ERROR_ID, "current[0]", "9223372036854775807", NULL);
    arena_check(&memory);
    arena_free(&memory);
}

/* Entries that are negative, past the position or anything else contribute no token; twice counts twice. */
static void test_selections(void **state)
{
    (void)state;
    const int64_t junk[] = {INT64_MIN, INT64_MAX, -1, 1 << 20, 13, 12, 0, 0};
    for (int draw = 0; draw < test_draws(20); draw++) {
        world w;
        test_set_draw(draw);
        world_make(&w, (world_shape){.requests = 4, .exact_length = 100, .topk = 8, .groups = 2}, 900);
        test_random r = random_of(900, (uint64_t)draw);
        for (int64_t row = 0; row < w.rows; row++)
            for (int64_t i = 0; i < w.selected.shape[1]; i++)
                *(int64_t *)tensor_at(&w.selected, row, i, 0, 0) =
                    row ? junk[random_between(&r, 0, 7)] : junk[0];
        csa_attend_args attend = world_attend(&w);
        CHECK_OK(csa_attend(plain_context(), &attend));
        expect_attended(&attend); /* row 0 has no token: 0 and -inf */
        expect_refused(csa_attend(checking_context(), &attend), CSA_ERROR_ID, "selected[0, 0]", NULL);
        world_end(&w);
    }
}

/* Rows that say where they stand: their word counts, not the tokens'. */
static void test_rows(void **state)
{
    (void)state;
    const int64_t positions[] = {INT64_MAX, INT64_MIN, -1, 99, 3, 1 << 30};
    world w;
    world_make(&w, (world_shape){.requests = 3, .exact_length = 100, .topk = 3, .groups = 2}, 1000);
    csa_step_args step = world_step(&w);
    CHECK_OK(csa_decode(plain_context(), &step));
    for (int row = 0; row < 6; row++) {
        *i64_at(&w.rows_out.positions, row) = positions[row];
        *(uint8_t *)tensor_at(&w.rows_out.active, row, 0, 0, 0) = row == 5 ? 0 : 0xFF; /* not 0 is true */
    }
    *i64_at(&w.selected, 0) = 0; /* region 0 lies as far behind as can be */
    csa_attend_args attend = world_attend(&w);
    attend.rows = &w.rows_out;
    CHECK_OK(csa_attend(plain_context(), &attend));
    expect_attended(&attend);
    world_end(&w);
}

/* ---- Slots and rings ---------------------------------------------------------------------------- */

static const int64_t odd_slots[] = {INT64_MAX, INT64_MIN, -1, 0 /* the first past the cache */, INT64_MAX - 7};

/* A closing token whose slot is past the cache, or negative: nothing is summarised; verify keeps its row. */
static void summarize_bad_slots(bool verify)
{
    world w;
    world_make(&w, (world_shape){.requests = 6, .exact_length = 64}, 1100);
    for (int i = 0; i < 5; i++)
        *i64_at(&w.step.slots, i) = i == 3 ? w.blocks * 16 : odd_slots[i];
    tensor_randomise(&w.prepare.index_key_out, &w.random, 1);
    csa_tensor ring = copy_of(&w.memory, &w.cache.ring), kept = copy_of(&w.memory, &w.cache.summaries);
    csa_summarize_args a = world_summarize(&w);
    CHECK_OK((verify ? csa_summarize_verify : csa_summarize_decode)(plain_context(), &a));
    int64_t closed = *i64_at(&w.step.slots, 5) / 8, rows[6], count = 0;
    expect_rows_written("summaries", &kept, &w.cache.summaries, 1, &closed);
    for (int i = 0; verify && i < 6; i++) /* position 63 */
        if (i != 1 && i != 2)
            rows[count++] = *i64_at(&w.step.ring_base, i) + 63 % w.cache.ring_capacity;
    expect_rows_written("ring", &ring, &w.cache.ring, count, rows);
    expect_refused(csa_summarize_verify(checking_context(), &a), CSA_ERROR_ID, "slots[0]", NULL);
    world_end(&w);
}

static void test_summarize_slots(void **state)
{
    (void)state;
    summarize_bad_slots(false);
    summarize_bad_slots(true);
}

static void test_prepare_slots(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 6, .exact_length = 64, .kv_dtype = CSA_E4M3}, 1200);
    for (int i = 0; i < 5; i++)
        *i64_at(&w.step.slots, i) = i == 3 ? w.blocks * 16 : odd_slots[i];
    csa_tensor before = copy_of(&w.memory, &w.cache.kv);
    CHECK_OK(csa_prepare(plain_context(), &w.prepare));
    expect_rows_written("kv", &before, &w.cache.kv, 1, i64_at(&w.step.slots, 5));
    expect_refused(csa_prepare(checking_context(), &w.prepare), CSA_ERROR_ID, "slots[0]", NULL);
    world_end(&w);
}

static bool all_zero(arena *memory, const csa_tensor *t, int64_t token)
{
    csa_tensor one = tensor_slice(*t, token, 1), dense = copy_of(memory, &one);
    const uint8_t *bytes = dense.data;
    for (int64_t i = 0; i < tensor_count(&dense) * tensor_itemsize(dense.dtype); i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

/* Positions outside a table that is read, the attention's being the shorter: all outputs are zeros, and so is
 * what an active token writes. */
static void test_past_tables(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 7, .exact_length = 40, .index_heads = 2}, 1250);
    csa_prepare_args *p = &w.prepare;
    p->rope = arena_tensor(&w.memory, "short rope", NULL, CSA_F32, 2, 20, 64);
    p->index_rope = arena_tensor(&w.memory, "short index rope", NULL, CSA_BF16, 2, 25, 32);
    tensor_randomise(&p->rope, &w.random, 1);
    tensor_randomise(&p->index_rope, &w.random, 1);
    const int64_t positions[] = {20, 24, 25, INT64_MAX, INT32_MAX, 19, -1};
    for (int i = 0; i < 7; i++)
        *i64_at(&w.step.positions, i) = positions[i];
    csa_tensor *outputs[] = {&p->index_query_out, &p->index_key_out, &p->index_weights_out,
                             &p->query_out,       &p->key_out,       &p->value_out};
    uint8_t *before = arena_snapshot(&w.memory);
    expect_refused(csa_prepare(checking_context(), p), CSA_ERROR_ID, "position of token[0] is 20", "0 to 19",
                   NULL);
    CHECK(arena_unchanged(&w.memory, before));
    CHECK_OK(csa_prepare(plain_context(), p));
    for (int64_t t = 0; t < 7; t++) {
        for (int i = 0; i < COUNT_OF(outputs); i++)
            CHECK(all_zero(&w.memory, outputs[i], t) == (t != 5));
        int64_t slot = *i64_at(&w.step.slots, t);
        double cached = tensor_value(&w.cache.kv, slot / 16, 0, slot % 16, 200);
        CHECK(t == 6 || (cached == 0) == (t != 5));
    }
    free(before);
    world_end(&w);
}

/* Ring rows past the ring write nothing, and a region that would need one is not summarised. */
static void test_ring_bases(void **state)
{
    (void)state;
    for (int closing = 0; closing < 2; closing++) {
        world w;
        world_make(&w, (world_shape){.requests = 8, .exact_length = closing ? 64 : 62}, 1300);
        int64_t ring_rows = w.cache.ring.shape[0]; /* capacity 8 */
        const int64_t bases[] = {INT64_MAX,     INT64_MIN, -1, ring_rows,    ring_rows - 1,
                                 INT64_MAX - 5, 4,         20, ring_rows - 6};
        for (int i = 0; i < 8; i++)
            *i64_at(&w.step.ring_base, i) = bases[i];
        *i64_at(&w.step.ring_base, 3) = ring_rows - 6;
        tensor_randomise(&w.prepare.index_key_out, &w.random, 1);
        csa_tensor ring = copy_of(&w.memory, &w.cache.ring), kept = copy_of(&w.memory, &w.cache.summaries);
        csa_summarize_args a = world_summarize(&w);
        CHECK_OK(csa_summarize_decode(plain_context(), &a));
        int64_t stored[] = {ring_rows - 6 + 5, 4 + 5, 20 + 5}; /* position 61 */
        int64_t closed[] = {*i64_at(&w.step.slots, 6) / 8, *i64_at(&w.step.slots, 7) / 8};
        expect_rows_written("ring", &ring, &w.cache.ring, closing ? 0 : 3, stored);
        expect_rows_written("summaries", &kept, &w.cache.summaries, closing ? 2 : 0, closed);
        expect_refused(csa_summarize_decode(checking_context(), &a), CSA_ERROR_ID, "ring_base[0]", NULL);
        world_end(&w);
    }
}

/* ---- Plans -------------------------------------------------------------------------------------- */

/* Bounds of any size; rows past theirs rank planned regions only. */
static void test_plan_bounds(void **state)
{
    (void)state;
    const int64_t bounds[] = {INT64_MAX, INT64_MIN, 0, -1, 30, 99};
    world w;
    world_make(&w, (world_shape){.requests = 6, .exact_length = 100}, 1400);
    csa_context *context = test_context((csa_context_options){.threads = 2, .scratch_limit = 1});
    csa_context *checking =
        test_context((csa_context_options){.threads = 2, .scratch_limit = 1, .check = true});
    csa_plan_args args = {.size = sizeof args, .positions = bounds, .tokens = 6, .requests = 6, .topk = 4};
    args.regions = w.regions;
    csa_plan *plan = NULL, *checked = NULL;
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    CHECK_OK(csa_plan_prefill(checking, &args, &checked));
    csa_step_args step = world_step(&w);
    CHECK_OK(csa_prefill(context, plan, &step));
    for (int64_t row = 0; row < 6; row++) {
        int64_t planned = bounds[row] < 0 ? 0 : bounds[row] / 8 < 12 ? bounds[row] / 8 : 12;
        for (int64_t i = 0; i < w.selected.shape[1]; i++) {
            int64_t region = *(int64_t *)tensor_at(&w.selected, row, i, 0, 0);
            CHECK(region >= -1 && region <= planned);
        }
    }
    expect_refused(csa_prefill(checking, checked, &step), CSA_ERROR_ID, "token 1", "bound", NULL);
    csa_plan_destroy(plan);
    csa_plan_destroy(checked);
    csa_context_destroy(context);
    csa_context_destroy(checking);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_blocks),      cmocka_unit_test(test_narrow_table),
        cmocka_unit_test(test_exact_table),     cmocka_unit_test(test_positions),
        cmocka_unit_test(test_owners),          cmocka_unit_test(test_query_start),
        cmocka_unit_test(test_seq_lens),        cmocka_unit_test(test_currents),
        cmocka_unit_test(test_selections),      cmocka_unit_test(test_rows),
        cmocka_unit_test(test_summarize_slots), cmocka_unit_test(test_prepare_slots),
        cmocka_unit_test(test_past_tables),     cmocka_unit_test(test_ring_bases),
        cmocka_unit_test(test_plan_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
