/*
 * Planning: sizes and layouts as pure functions (src/plan.h), exact workspaces, plans' lives, a context's
 * scratch. SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include "context.h"
#include "plan.h"

static csa_step_shape draw_shape(test_random *r)
{
    csa_step_shape s = {
        .tokens = random_between(r, 0, 1) ? random_between(r, 1, 50) : random_between(r, 1, 100000),
        .groups = random_between(r, 1, 8),
        .regions = random_between(r, 0, 1) ? random_between(r, 0, 60) : random_between(r, 0, 200000),
        .topk = random_between(r, 1, 1024),
        .limit = (size_t)1 << random_between(r, 0, 30),
        .cuda = random_between(r, 0, 1) == 1,
    };
    return s;
}

/* Scratch of one token alone. */
static size_t least_bytes(csa_step_shape s)
{
    s.tokens = 1;
    return csa_step_bytes(&s);
}

/* ---- Pure functions ----------------------------------------------------------------------------- */

static void bytes_grow_within_the_limit(void **state)
{
    (void)state;
    for (int draw = 0; draw < 20000; draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 31);
        csa_step_shape s = draw_shape(&r), more = s;
        size_t bytes = csa_step_bytes(&s), least = least_bytes(s);
        CHECK(bytes <= (s.limit > least ? s.limit : least));
        CHECK(bytes >= least);
        more.tokens += random_between(&r, 0, 100);
        CHECK(csa_step_bytes(&more) >= bytes);
        more.regions += random_between(&r, 0, 1000);
        CHECKF(csa_step_bytes(&more) >= bytes,
               "tokens %lld groups %lld regions %lld -> %lld topk %lld limit %zu", (long long)s.tokens,
               (long long)s.groups, (long long)s.regions, (long long)more.regions, (long long)s.topk, s.limit);
        more.limit *= 2;
        CHECK(csa_step_bytes(&more) >= bytes);
    }
    csa_step_shape none = {.groups = 8, .regions = 1000, .topk = 512, .limit = CSA_DEFAULT_SCRATCH};
    CHECK(csa_step_bytes(&none) == 0);
}

/* Scratch of so many tokens at a time, but for parts. */
static size_t chunk_bytes(csa_step_shape s, int64_t tokens)
{
    s.tokens = tokens;
    s.limit = SIZE_MAX;
    return csa_step_bytes(&s) - (size_t)csa_record_count(&s) * CSA_RECORD_BYTES;
}

static int64_t records(csa_step_shape s, int64_t tokens)
{
    s.tokens = tokens;
    return csa_record_count(&s);
}

/* As many parts as rows are cut into, in what the limit leaves. */
static void parts_find_room(void **state)
{
    (void)state;
    csa_step_shape s = {.groups = 1, .regions = 5000, .topk = 512, .limit = SIZE_MAX};
    CHECK(records(s, 1000) == 0);
    s.cuda = true;
    CHECK(records(s, 1) == 65); /* units */
    CHECK(records(s, 9) == 9 * 65);
    CHECK(records(s, 80) == 80 * 9); /* pieces */
    CHECK(records(s, 384) == 384 * 9);
    CHECK(records(s, INT32_MAX) == 384 * 9);
    s.limit = chunk_bytes(s, 80) + 10 * CSA_RECORD_BYTES;
    CHECK(records(s, 80) == 10);
    s.topk = 7;
    CHECK(records(s, 1) == 0); /* one unit */
    for (int draw = 0; draw < 20000; draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 34);
        csa_step_shape a = draw_shape(&r), more = a;
        size_t least = chunk_bytes(a, 1);
        CHECK(csa_step_bytes(&a) <= (a.limit > least ? a.limit : least));
        a.limit = more.limit = SIZE_MAX;
        more.tokens += random_between(&r, 0, 100);
        more.regions += random_between(&r, 0, 1000);
        CHECK(csa_record_count(&more) >= csa_record_count(&a));
    }
}

static void expect_cut(int64_t rows, int64_t columns, csa_cut_limits most, csa_cut expected)
{
    csa_cut cut = csa_cut_rows(rows, columns, &most);
    CHECKF(cut.entries == expected.entries && cut.parts == expected.parts,
           "%d rows of %d: %d parts of %d entries, expected %d of %d", (int)rows, (int)columns, (int)cut.parts,
           (int)cut.entries, (int)expected.parts, (int)expected.entries);
}

static void rows_are_cut_while_there_is_room(void **state)
{
    (void)state;
    csa_cut_limits most = {.units = 528, .quads = 330, .rows = 176, .records = 10000};
    const csa_cut whole = {0, 0};
    expect_cut(8, 513, most, (csa_cut){CSA_UNIT, 65});
    expect_cut(9, 513, most, (csa_cut){CSA_QUAD, 17}); /* too many units */
    expect_cut(19, 513, most, (csa_cut){CSA_QUAD, 17});
    expect_cut(20, 513, most, (csa_cut){CSA_PIECE, 9}); /* too many quads */
    expect_cut(176, 1025, most, (csa_cut){CSA_PIECE, 17});
    expect_cut(177, 1025, most, whole);
    expect_cut(8, 8, most, whole); /* one unit */
    expect_cut(8, 9, most, (csa_cut){CSA_UNIT, 2});
    expect_cut(176, 32, most, whole); /* too many units, one quad */
    expect_cut(176, 64, most, whole); /* too many quads, one piece */
    expect_cut(0, 513, most, whole);
    most.records = 519; /* no room for units */
    expect_cut(8, 513, most, (csa_cut){CSA_QUAD, 17});
    most.records = 8 * 17 - 1;
    expect_cut(8, 513, most, (csa_cut){CSA_PIECE, 9});
    most.records = 8 * 9 - 1;
    expect_cut(8, 513, most, whole);
    for (int draw = 0; draw < 20000; draw++) { /* what a step reserves is enough */
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 35);
        csa_step_shape s = draw_shape(&r);
        s.cuda = true;
        s.limit = SIZE_MAX;
        int64_t rows = random_between(&r, 1, s.tokens) * s.groups;
        most = (csa_cut_limits){.units = random_between(&r, 1, CSA_CUT_UNITS),
                                .quads = random_between(&r, 1, CSA_CUT_UNITS),
                                .rows = random_between(&r, 1, CSA_CUT_ROWS),
                                .records = INT64_MAX};
        csa_cut all = csa_cut_rows(rows, csa_list_columns(&s), &most);
        CHECK(rows * all.parts <= csa_record_count(&s));
    }
}

static void chunks_cover_the_tokens(void **state)
{
    (void)state;
    for (int draw = 0; draw < 20000; draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 32);
        csa_step_shape s = draw_shape(&r), more = s;
        int64_t chunk = csa_chunk_tokens(&s);
        CHECK(chunk >= 1 && chunk <= s.tokens);
        more.regions += random_between(&r, 0, 1000);
        CHECK(csa_chunk_tokens(&more) <= chunk);
        more = s;
        more.tokens += random_between(&r, 0, 1000);
        CHECK(s.cuda || csa_chunk_tokens(&more) >= chunk);
        /* More would not fit: a token, or a wave (less a token's rows, where groups are no power of two). */
        bool waves = s.cuda && chunk * s.groups > CSA_WAVE_ROWS - s.groups;
        if (chunk < s.tokens)
            CHECK(chunk_bytes(s, chunk + (waves ? CSA_WAVE_ROWS / s.groups + 1 : 1)) > s.limit);
        if (chunk > 1)
            CHECK(chunk_bytes(s, chunk) <= s.limit);
        csa_step_shape one = s;
        one.limit = 1;
        CHECK(csa_chunk_tokens(&one) == 1);
    }
    csa_step_shape prefill = {8192, 2, 16384, 512, CSA_DEFAULT_SCRATCH, true};
    CHECK(csa_chunk_tokens(&prefill) == 3 * CSA_WAVE_ROWS / 2);
    prefill.tokens = 900; /* all at once: as many as there are */
    CHECK(csa_chunk_tokens(&prefill) == 900);
}

static void expect_apart(const void *start, size_t bytes, const void *next, const char *name)
{
    CHECKF((const char *)start + bytes <= (const char *)next, "%s reaches into the next array", name);
    CHECKF((uintptr_t)start % 64 == 0, "%s is not aligned", name);
}

static void layouts_fit(void **state)
{
    (void)state;
    char *base = (char *)(uintptr_t)0x100000; /* nothing is touched */
    for (int draw = 0; draw < 20000; draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 33);
        csa_step_shape s = draw_shape(&r);
        size_t tokens = (size_t)csa_chunk_tokens(&s), rows = tokens * (size_t)s.groups;
        size_t columns = (size_t)csa_list_columns(&s);
        CHECK(columns == (size_t)(s.topk < s.regions ? s.topk : s.regions) + 1);
        CHECK(csa_step_ranks(&s) == (s.regions > s.topk));
        csa_chunk_arrays a = csa_lay_out_chunk(&s, base);
        CHECK((char *)a.positions >= base);
        expect_apart(a.positions, tokens * 8, a.owners, "positions");
        expect_apart(a.owners, tokens * 8, a.current, "owners");
        expect_apart(a.current, rows * 8, a.selected, "current");
        expect_apart(a.selected, rows * columns * 8, a.records, "selected");
        size_t records = (size_t)csa_record_count(&s);
        CHECK(s.cuda || records == 0);
        expect_apart(a.records, records * CSA_RECORD_BYTES, a.peaks, "records");
        int64_t peak_rows = csa_peak_rows(&s, (int64_t)rows);
        size_t peaks = s.cuda && csa_step_ranks(&s) ? (size_t)(peak_rows * csa_peak_stride(&s)) * 4 : 0;
        CHECK(peaks == 0 || csa_peak_stride(&s) * CSA_PEAK >= s.regions);
        CHECK(peak_rows == (int64_t)rows || (s.regions <= CSA_LONG_ROW && peak_rows == CSA_PEAK_ROWS));
        expect_apart(a.peaks, peaks, a.scores, "peaks");
        size_t scores = csa_step_ranks(&s) ? rows * (size_t)csa_score_stride(&s) * 4 : 0;
        expect_apart(a.scores, scores, base + csa_step_bytes(&s), "scores");
    }
}

static void huge_sizes_do_not_overflow(void **state)
{
    (void)state;
    const int64_t many[] = {1, 65537, INT32_MAX, (int64_t)1 << 36};
    const size_t limits[] = {0, 1, CSA_DEFAULT_SCRATCH, SIZE_MAX / 2, SIZE_MAX};
    for (int t = 0; t < 3; t++)
        for (int n = 0; n < 4; n++)
            for (int l = 0; l < 5; l++) {
                csa_step_shape s = {many[t], 8, many[n], 1024, limits[l], l % 2 == 1};
                size_t bytes = csa_step_bytes(&s), least = least_bytes(s);
                double all = (double)s.tokens * 8 * (double)s.regions * 4;
                CHECK(csa_chunk_tokens(&s) >= 1 && csa_chunk_tokens(&s) <= s.tokens);
                CHECK(bytes >= least && bytes <= (s.limit > least ? s.limit : least));
                if (l >= 3 && n == 3 && all < 1e18)
                    CHECK((double)bytes >= all);
            }
    csa_serving serving = {.size = sizeof serving,
                           .regions = (int64_t)1 << 36,
                           .decode_tokens = INT32_MAX,
                           .prefill_tokens = INT32_MAX,
                           .groups = 8,
                           .topk = 1024};
    size_t bytes = 0;
    CHECK_OK(csa_workspace_size(NULL, &serving, &bytes));
    CHECK(bytes >= ((size_t)8 << 36) * 4);
    serving.regions = INT64_MAX;
    CHECK(csa_workspace_size(NULL, &serving, &bytes) != CSA_OK);
    serving.regions = 1 << 20;
    csa_context_options options = {.size = sizeof options, .scratch_limit = SIZE_MAX};
    CHECK_OK(csa_workspace_size(&options, &serving, &bytes));
    CHECK((double)bytes >= 0x1p31 * 8 * 0x1p20 * 4 * 0.99);
}

/* ---- Exact workspaces --------------------------------------------------------------------------- */

static csa_plan *plan_of(const csa_context *context, const world *w, const int64_t *positions)
{
    csa_plan *plan = NULL;
    csa_plan_args args = {.size = sizeof args,
                          .positions = positions,
                          .tokens = w->tokens,
                          .requests = w->shape.requests,
                          .regions = w->regions,
                          .groups = w->shape.groups,
                          .topk = w->shape.topk,
                          .invariant = true};
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    return plan;
}

static csa_status run(const csa_context *context, world *w, const csa_plan *plan, int which, size_t bytes)
{
    csa_step_args step = world_step(w);
    csa_layer_args layer = world_layer(w);
    step.workspace.bytes = layer.workspace.bytes = bytes;
    return which == 0   ? csa_decode(context, &step)
           : which == 1 ? csa_prefill(context, plan, &step)
                        : csa_layer(context, which == 2 ? NULL : plan, &layer);
}

static void add_query_start(world *w)
{
    w->step.query_start = arena_tensor(&w->memory, "query_start", NULL, CSA_I32, 1, w->shape.requests + 1);
    for (int64_t q = 0; q <= w->shape.requests; q++)
        tensor_put(&w->step.query_start, (double)(q * w->shape.query_len), q, 0, 0, 0);
}

/* The published workspace is enough, for smaller steps too; one byte less is refused before anything is
 * written. */
static void exact_workspace(void **state)
{
    (void)state;
    const size_t limits[] = {0, 1, 3000, 20000};
    for (int draw = 0; draw < test_draws(80); draw++) {
        test_set_draw(draw);
        csa_context_options options = {.size = sizeof options, .threads = 2, .scratch_limit = limits[draw % 4]};
        csa_context *context = test_context(options);
        world w;
        world_make(&w,
                   (world_shape){.groups = 1 + draw % 3, .requests = 4, .query_len = 2, .topk = 1 + draw % 20},
                   (uint64_t)draw);
        add_query_start(&w);
        csa_serving serving = world_serving(&w);
        size_t bytes;
        CHECK_OK(csa_workspace_size(&options, &serving, &bytes));
        /* In memory that ends with the workspace. */
        w.workspace.data = arena_buffer(&w.memory, "workspace", bytes)->data;
        memset(w.memory.first->covered, 1, bytes);
        csa_plan *plan = plan_of(context, &w, NULL);
        uint8_t *before = arena_snapshot(&w.memory);
        for (int which = 0; which < 4; which++) {
            CHECK(run(context, &w, plan, which, bytes - 1) == CSA_ERROR_WORKSPACE);
            CHECKF(strstr(test_error(), "workspace has"), "%s", test_error());
        }
        CHECK(arena_unchanged(&w.memory, before));
        free(before);
        for (int which = 0; which < 4; which++)
            CHECK_OK(run(context, &w, plan, which, bytes));
        csa_plan_destroy(plan);
        csa_context_destroy(context);
        world_end(&w);
    }
}

/* ---- Plans' lives ------------------------------------------------------------------------------- */

static void expect_prefill_like_decode(const csa_context *context, world *w, const csa_plan *plan)
{
    csa_step_args decode = world_step(w), prefill = decode;
    decode.regions = prefill.regions = w->regions;
    prefill.out = w->query; /* in place: each is run once */
    csa_tensor selected = decode.selected;
    CHECK_OK(csa_decode(context, &decode));
    csa_tensor copy =
        arena_tensor(&w->memory, "copy", NULL, CSA_I64, 2, (int)selected.shape[0], (int)selected.shape[1]);
    tensor_copy(&copy, &selected);
    tensor_set(&selected, 0xFF);
    CHECK_OK(csa_prefill(context, plan, &prefill));
    tensor_expect_equal("selected", &selected, &copy);
    tensor_expect_equal("out", &w->query, &w->out);
}

/* One plan is made again and again for steps of other sizes, while others wait. */
static void plans_are_made_anew(void **state)
{
    (void)state;
    enum { WORLDS = 8 };
    csa_context *context = test_context((csa_context_options){.threads = 2, .scratch_limit = 4000});
    world worlds[WORLDS];
    csa_plan *again = NULL, *plans[WORLDS] = {NULL};
    for (int i = 0; i < WORLDS; i++) {
        test_set_draw(i);
        world_make(&worlds[i],
                   (world_shape){.requests = 1 + (i * 5) % 8, .query_len = 1 + i % 3, .groups = 1 + i % 4},
                   (uint64_t)i);
        plans[i] = plan_of(context, &worlds[i], NULL);
        csa_plan_args args = {.size = sizeof args, .tokens = 1000 - i * 100, .requests = 5, .regions = 100};
        csa_plan *kept = again;
        CHECK_OK(csa_plan_prefill(context, &args, &again));
        CHECK(!kept || again == kept);
        args.tokens = worlds[i].tokens;
        args.requests = worlds[i].shape.requests;
        args.regions = worlds[i].regions;
        args.groups = worlds[i].shape.groups;
        args.topk = worlds[i].shape.topk;
        CHECK_OK(csa_plan_prefill(context, &args, &again));
        if (i % 2)
            expect_prefill_like_decode(context, &worlds[i], again);
    }
    for (int i = 0; i < WORLDS; i += 2)
        expect_prefill_like_decode(context, &worlds[i], plans[i]);
    for (int i = 0; i < WORLDS; i++) {
        csa_plan_destroy(plans[i]);
        world_end(&worlds[i]);
    }
    csa_plan_destroy(again);
    csa_plan_destroy(NULL);
    csa_context_destroy(context);
}

static int64_t *true_positions(const world *w)
{
    int64_t *positions = calloc((size_t)w->tokens, sizeof *positions);
    for (int64_t t = 0; t < w->tokens; t++)
        positions[t] = *(int64_t *)tensor_at(&w->step.positions, t, 0, 0, 0);
    return positions;
}

/* Exact, loose and absent positions plan the same results; a position past its bound is an error when checking,
 * and otherwise harms no other row. */
static void positions_are_upper_bounds(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        csa_context *context = test_context((csa_context_options){.threads = 2, .scratch_limit = 1});
        csa_context *strict =
            test_context((csa_context_options){.threads = 2, .scratch_limit = 1, .check = true});
        for (int how = 0; how < 3; how++) {
            world w;
            world_make(&w, (world_shape){.requests = 4, .query_len = 3, .max_length = 150}, (uint64_t)draw);
            int64_t *positions = true_positions(&w);
            for (int64_t t = 0; how == 1 && t < w.tokens; t++)
                positions[t] += 1 + 7 * t;
            csa_plan *plan = plan_of(context, &w, how == 2 ? NULL : positions);
            expect_prefill_like_decode(context, &w, plan);
            csa_plan_destroy(plan);
            free(positions);
            world_end(&w);
        }
        world w;
        world_make(&w, (world_shape){.requests = 4, .exact_length = 100, .topk = 2}, (uint64_t)draw);
        int64_t *positions = true_positions(&w);
        positions[1] = 95; /* token 1 stands at 99, one region further */
        csa_plan *plan = plan_of(context, &w, positions), *checked = plan_of(strict, &w, positions);
        csa_step_args step = world_step(&w);
        CHECK(csa_prefill(strict, checked, &step) == CSA_ERROR_ID);
        CHECKF(strstr(test_error(), "token 1 stands at 99"), "%s", test_error());
        CHECK_OK(csa_prefill(context, plan, &step));
        csa_tensor row = tensor_slice(w.out, 1, 1), others = tensor_slice(w.out, 2, 2);
        csa_tensor copy = arena_tensor(&w.memory, "copy", NULL, CSA_BF16, 4, 2, 1, 1, CSA_HEAD_SIZE);
        tensor_copy(&copy, &others);
        CHECK(!isnan(tensor_value(&row, 0, 0, 0, 0)));
        CHECK_OK(csa_decode(context, &step));
        tensor_expect_equal("out", &copy, &others);
        csa_plan_destroy(plan);
        csa_plan_destroy(checked);
        free(positions);
        world_end(&w);
        csa_context_destroy(context);
        csa_context_destroy(strict);
    }
}

static void expect_refused(const csa_context *context, csa_plan_args args, csa_status status, const char *text)
{
    csa_plan *plan = NULL;
    args.size = sizeof args;
    CHECKF(csa_plan_prefill(context, &args, &plan) == status, "%s", text);
    CHECK(!plan);
    CHECKF(strstr(test_error(), text), "got \"%s\", expected \"%s\"", test_error(), text);
}

static void bad_plans_are_refused(void **state)
{
    (void)state;
    csa_context *context = test_context((csa_context_options){.threads = 1});
    expect_refused(context, (csa_plan_args){.tokens = -1}, CSA_ERROR_UNSUPPORTED, "tokens is -1");
    expect_refused(context, (csa_plan_args){.requests = -5}, CSA_ERROR_UNSUPPORTED, "requests is -5");
    expect_refused(context, (csa_plan_args){.regions = -1}, CSA_ERROR_UNSUPPORTED, "regions is -1");
    expect_refused(context, (csa_plan_args){.regions = INT64_MAX}, CSA_ERROR_UNSUPPORTED,
                   "regions is 9223372036854775807");
    expect_refused(context, (csa_plan_args){.groups = 9}, CSA_ERROR_UNSUPPORTED, "groups is 9");
    expect_refused(context, (csa_plan_args){.topk = 1025}, CSA_ERROR_UNSUPPORTED, "topk is 1025");
    expect_refused(context, (csa_plan_args){.topk = -1}, CSA_ERROR_UNSUPPORTED, "topk is -1");
    expect_refused(NULL, (csa_plan_args){.tokens = 1}, CSA_ERROR_ARGUMENT, "context is NULL");
    csa_plan *plan = NULL;
    CHECK(csa_plan_prefill(context, NULL, &plan) == CSA_ERROR_ARGUMENT && !plan);
    csa_plan_args args = {
        .size = sizeof args, .tokens = 3, .requests = 1, .regions = 9, .groups = 2, .topk = 4};
    CHECK(csa_plan_prefill(context, &args, NULL) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "plan is NULL"), "%s", test_error());
    /* On failure a plan stays as it was. */
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    csa_plan before = *plan;
    args.topk = 2000;
    csa_plan *same = plan;
    CHECK(csa_plan_prefill(context, &args, &plan) == CSA_ERROR_UNSUPPORTED);
    CHECK(plan == same && memcmp(&before, plan, sizeof before) == 0);
    csa_plan_destroy(plan);
    csa_context_destroy(context);
}

/* A step must be what its plan was made for. */
static void wrong_plans_are_refused(void **state)
{
    (void)state;
    csa_context *context = test_context((csa_context_options){.threads = 1});
    csa_context *other = test_context((csa_context_options){.threads = 1});
    world w;
    world_make(&w, (world_shape){.requests = 3, .query_len = 2, .groups = 2, .topk = 3}, 1);
    add_query_start(&w);
    csa_plan *plan = plan_of(context, &w, NULL);
    csa_step_args step = world_step(&w), wrong = step;
    csa_layer_args layer = world_layer(&w);
    uint8_t *before = arena_snapshot(&w.memory);
    CHECK(csa_prefill(other, plan, &step) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "another context"), "%s", test_error());
    CHECK(csa_layer(other, plan, &layer) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "another context"), "%s", test_error());
    CHECK(csa_prefill(context, NULL, &step) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "plan is NULL"), "%s", test_error());
    wrong.topk = 4;
    CHECK(csa_prefill(context, plan, &wrong) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "topk is 4, expected the plan's 3"), "%s", test_error());
    wrong = step;
    wrong.regions++;
    CHECK(csa_prefill(context, plan, &wrong) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "expected the plan's"), "%s", test_error());
    CHECK(arena_unchanged(&w.memory, before));
    free(before);
    wrong = step; /* 0 means the plan's */
    wrong.regions = wrong.topk = 0;
    CHECK_OK(csa_prefill(context, plan, &wrong));
    csa_plan_args args = {
        .size = sizeof args, .tokens = 5, .requests = 3, .regions = w.regions, .groups = 2, .topk = 3};
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    CHECK(csa_prefill(context, plan, &step) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "6 tokens") && strstr(test_error(), "plan has 5"), "%s", test_error());
    CHECK(csa_layer(context, plan, &layer) == CSA_ERROR_ARGUMENT); /* 1 token left for 0 requests */
    args.tokens = 6;
    args.groups = 1;
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    CHECK(csa_prefill(context, plan, &step) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "2 KV groups") && strstr(test_error(), "plan has 1"), "%s", test_error());
    csa_plan_destroy(plan);
    world_end(&w);
    csa_context_destroy(other);
    csa_context_destroy(context);
}

/* A context's scratch starts on a huge page, and one call at a time has it. */
static void scratch_is_on_huge_pages(void **state)
{
    (void)state;
    csa_context *context;
    csa_context_options options = {.size = sizeof options, .backend = CSA_BACKEND_CPU, .threads = 2};
    CHECK_OK(csa_context_create(&options, &context));
    char *scratch = csa_take_scratch(context);
    CHECK(scratch && (uintptr_t)scratch % (2 << 20) == 0);
    CHECK(!csa_take_scratch(context));
    csa_return_scratch(context);
    CHECK(csa_take_scratch(context) == scratch);
    csa_return_scratch(context);
    csa_context_destroy(context);
}

int main(void)
{
    test_needs_host("it links the library's objects themselves, the mirror cannot stand in front of them");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_grow_within_the_limit),
        cmocka_unit_test(parts_find_room),
        cmocka_unit_test(rows_are_cut_while_there_is_room),
        cmocka_unit_test(chunks_cover_the_tokens),
        cmocka_unit_test(layouts_fit),
        cmocka_unit_test(huge_sizes_do_not_overflow),
        cmocka_unit_test(exact_workspace),
        cmocka_unit_test(plans_are_made_anew),
        cmocka_unit_test(positions_are_upper_bounds),
        cmocka_unit_test(bad_plans_are_refused),
        cmocka_unit_test(wrong_plans_are_refused),
        cmocka_unit_test(scratch_is_on_huge_pages),
    };
    test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
