/*
 * Page lists of a selection (csa_compat.h, section 9) against straightforward recomputation: random draws, the
 * corners that broke others' lists, junk in plans, refused views, bad ids. SPDX-License-Identifier: Apache-2.0
 */
#include "compat.h"

/* ---- Lists of a selection ----------------------------------------------------------------------- */

static int32_t expected_page(const world *w, const csa_tensor *kv, int64_t token, int64_t region)
{
    int64_t block = entry_block(w, token, region);
    int64_t between = w->blocks > 1 ? kv->stride[0] / (8 * kv->stride[2]) : 0;
    return block < 0 ? 0 : (int32_t)(block * between + region % (w->shape.block_size / 8));
}

/* counts entries of each row's list from indptr on, the last ones of those used. */
static void expect_lists(const world *w, const csa_compat_pages_args *a)
{
    int64_t columns = a->selected.shape[1];
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t count = at(&a->page_counts, token), start = at(&a->page_indptr, token);
        CHECK(at(&a->last_page_len, token) == (count ? position_of(w, token) % 8 + 1 : 0));
        for (int64_t i = 0; i < count; i++) {
            int64_t region = entry(&a->selected, token, columns - count + i);
            CHECK(at(&a->pages, start + i) == expected_page(w, &a->cache->kv, token, region));
        }
    }
}

static void test_pages(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, true);
        csa_status status = csa_compat_pages(context, &p.args);
        if (!pages_possible(&p.cache.kv)) {
            expect_status(status, CSA_ERROR_UNSUPPORTED, "stride");
        } else {
            CHECK_OK(status);
            int64_t end = 0;
            for (int64_t token = 0; token < p.w.tokens; token++) {
                CHECK(at(&p.args.page_indptr, token) == end);
                CHECK(at(&p.args.page_counts, token) == used_entries(&p.w, token, p.args.selected.shape[1]));
                end += at(&p.args.page_counts, token);
            }
            CHECK(at(&p.args.page_indptr, p.w.tokens) == end);
            CHECKF(at(&p.args.pages, end) == -1, "written past the end");
            expect_lists(&p.w, &p.args);
        }
        world_end(&p.w);
    }
}

/* Upper bounds first, then the fix-up. The pages are those of the true positions, at the planned places. */
static void test_planned_pages(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, true);
        csa_tokens bounds = {.size = sizeof bounds};
        bounds.positions = arena_tensor(&p.w.memory, "bounds", &p.w.random, CSA_I64, 1, p.w.tokens);
        for (int64_t i = 0; i < p.w.tokens; i++)
            tensor_put(&bounds.positions, (double)(position_of(&p.w, i) + random_between(&p.w.random, 0, 50)),
                       i, 0, 0, 0);
        csa_compat_pages_args plan = {.size = sizeof plan, .tokens = &bounds};
        plan.columns = p.args.selected.shape[1];
        plan.page_indptr = p.args.page_indptr;
        CHECK_OK(csa_compat_pages(context, &plan));
        for (int64_t i = 0; i < p.w.tokens; i++) {
            int64_t bound = at(&bounds.positions, i), most = bound < 0 ? 0 : bound / 8 + 1;
            CHECK(at(&plan.page_indptr, i + 1) - at(&plan.page_indptr, i) ==
                  (most < plan.columns ? most : plan.columns));
        }
        p.args.planned = true;
        if (pages_possible(&p.cache.kv)) {
            CHECK_OK(csa_compat_pages(context, &p.args));
            for (int64_t i = 0; i < p.w.tokens; i++)
                CHECK(at(&p.args.page_counts, i) == used_entries(&p.w, i, plan.columns));
            expect_lists(&p.w, &p.args);
        }
        world_end(&p.w);
    }
}

/* Any page_indptr: nothing outside pages is written, counts say what fits. */
static void test_junk_plan(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(DRAWS); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, false);
        int64_t room = p.args.pages.shape[0], columns = p.args.selected.shape[1];
        for (int64_t i = 0; i <= p.w.tokens; i++)
            tensor_put(&p.args.page_indptr,
                       RANDOM_OF(&p.w.random, INT32_MIN, -1, 0, 1, (int32_t)room - 1, (int32_t)room, INT32_MAX),
                       i, 0, 0, 0);
        p.args.planned = true;
        if (pages_possible(&p.cache.kv))
            CHECK_OK(csa_compat_pages(context, &p.args));
        for (int64_t i = 0; pages_possible(&p.cache.kv) && i < p.w.tokens; i++) {
            int64_t start = at(&p.args.page_indptr, i), end = at(&p.args.page_indptr, i + 1);
            int64_t fits = (end < room ? end : room) - start, needed = used_entries(&p.w, i, columns);
            CHECK(at(&p.args.page_counts, i) == (start < 0 || fits < 0 ? 0 : fits < needed ? fits : needed));
        }
        world_end(&p.w);
    }
}

/* ---- Refusals ----------------------------------------------------------------------------------- */

/* A refused call writes nothing. */
static void expect_refused(page_case *p, csa_status expected, const char *words)
{
    uint8_t *before = arena_snapshot(&p->w.memory);
    expect_status(csa_compat_pages(context, &p->args), expected, words);
    CHECK(arena_unchanged(&p->w.memory, before));
    free(before);
}

static void test_refused_views(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; make_pages(&p, draw, false), !pages_possible(&p.cache.kv); draw++)
        world_end(&p.w);
    csa_compat_pages_args good = p.args;
    p.args.pages.shape[0] = p.w.tokens * good.selected.shape[1] - 1;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "rows * columns");
    p.args = good;
    p.args.selected.dtype = CSA_I32;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "selected");
    p.args = good;
    p.args.selected.ndim = 0;
    p.args.columns = 3;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "selected is absent");
    p.args = good;
    p.args.columns = good.selected.shape[1] + 1;
    expect_refused(&p, CSA_ERROR_ARGUMENT, "columns");
    p.args = good;
    p.args.page_indptr.shape[0]++;
    expect_refused(&p, CSA_ERROR_ARGUMENT, NULL);
    csa_compat_gather_args gather = make_gather(&p);
    gather.key.shape[0]--;
    gather.value.shape[0]--;
    expect_status(csa_compat_gather(context, &gather), CSA_ERROR_ARGUMENT, "room");
    world_end(&p.w);
}

/* ---- Checking mode ------------------------------------------------------------------------------ */

static void test_checking(void **state)
{
    (void)state;
    static page_case p;
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        make_pages(&p, draw, false);
        csa_compat_gather_args gather = make_gather(&p);
        int64_t columns = p.args.selected.shape[1], last = p.w.tokens - 1;
        bool active = position_of(&p.w, last) >= 0;
        CHECK_OK(csa_compat_gather(checking, &gather));
        if (!pages_possible(&p.cache.kv)) {
            world_end(&p.w);
            continue;
        }
        CHECK_OK(csa_compat_pages(context, &p.args));
        *(int64_t *)tensor_at(&p.args.selected, last, columns - 1, 0, 0) = -1;
        if (active)
            expect_status(csa_compat_gather(checking, &gather), CSA_ERROR_ID, "selected");
        p.args.planned = true;
        p.args.selected.ndim = 0;
        p.args.columns = columns;
        p.args.pages.ndim = 0;
        CHECK_OK(csa_compat_pages(checking, &p.args));
        if (active) {
            tensor_put(&p.args.page_indptr, (double)at(&p.args.page_indptr, last + 1), last, 0, 0, 0);
            expect_status(csa_compat_pages(checking, &p.args), CSA_ERROR_ID, "token");
        }
        world_end(&p.w);
    }
}

/* ------------------------------------------------------------------------------------------------- */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages),     cmocka_unit_test(test_planned_pages),
        cmocka_unit_test(test_junk_plan), cmocka_unit_test(test_refused_views),
        cmocka_unit_test(test_checking),
    };
    return cmocka_run_group_tests(tests, compat_set_up, compat_tear_down);
}
