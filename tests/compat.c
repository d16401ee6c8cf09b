/* SPDX-License-Identifier: Apache-2.0 */
#include "compat.h"

csa_context *context, *checking;

int compat_set_up(void **state)
{
    (void)state;
    context = test_context((csa_context_options){.threads = 3});
    checking = test_context((csa_context_options){.threads = 1, .check = true});
    return 0;
}

int compat_tear_down(void **state)
{
    (void)state;
    csa_context_destroy(context);
    csa_context_destroy(checking);
    return 0;
}

void expect_status(csa_status got, csa_status expected, const char *words)
{
    CHECKF(got == expected, "status %s, expected %s: %s", csa_status_name(got), csa_status_name(expected),
           test_error());
    CHECKF(!words || strstr(test_error(), words), "no \"%s\" in: %s", words, test_error());
}

/* ---- Straightforward definitions ---------------------------------------------------------------- */

int64_t block_of(const csa_tensor *table, int64_t request, int64_t column, int64_t blocks)
{
    if (request < 0 || request >= table->shape[0] || column >= table->shape[1])
        return -1;
    int64_t block = (int64_t)tensor_value(table, request, column, 0, 0);
    return block >= 0 && block < blocks ? block : -1;
}

csa_cache one_group(const world *w, int64_t group)
{
    csa_cache cache = w->cache;
    cache.kv.data = tensor_at(&w->cache.kv, 0, group, 0, 0);
    cache.kv.shape[1] = 1;
    return cache;
}

void spoil_table(world *w)
{
    csa_tensor *table = &w->step.block_table;
    for (int64_t i = 0; i < table->shape[0]; i++)
        for (int64_t j = 0; j < table->shape[1]; j++)
            if (random_chance(&w->random, 15))
                tensor_put(table, RANDOM_OF(&w->random, -1, INT32_MIN, INT32_MAX, (int32_t)w->blocks), i, j, 0,
                           0);
}

world_shape random_shape(uint64_t draw)
{
    test_random r = random_of(draw, 1);
    return (world_shape){
        .groups = RANDOM_OF(&r, 1, 2, 4),
        .heads = RANDOM_OF(&r, 1, 8, 8, 16),
        .block_size = RANDOM_OF(&r, 16, 32, 64, 128),
        .requests = (int32_t)random_between(&r, 1, 5),
        .query_len = (int32_t)random_between(&r, 1, 3),
        .kv_dtype = random_chance(&r, 50) ? CSA_E4M3 : CSA_BF16,
        .max_length = RANDOM_OF(&r, 5, 40, 40, 300, 300, 300, 1500),
        .topk = RANDOM_OF(&r, 1, 4, 20),
        .strided = random_chance(&r, 50),
        .inactive = random_chance(&r, 50),
    };
}

/* ---- Lists of a selection ----------------------------------------------------------------------- */

/* Ascending regions up to the current one: all of them good, or with junk in between and before. */
static csa_tensor make_lists(world *w, int64_t columns, bool junk)
{
    csa_tensor lists =
        arena_tensor(&w->memory, "lists", w->shape.strided ? &w->random : NULL, CSA_I64, 2, w->tokens, columns);
    for (int64_t token = 0; token < w->tokens; token++) {
        int64_t current = position_of(w, token) / 8, region = current;
        for (int64_t j = columns - 1; j >= 0; j--) {
            int64_t value = region >= 0 ? region : -1;
            if (junk && j < columns - 1 && random_chance(&w->random, 20))
                value = (int64_t[]){INT64_MIN, -7, current + 1, INT64_MAX,
                                    current}[random_between(&w->random, 0, 4)];
            *(int64_t *)tensor_at(&lists, token, j, 0, 0) = value;
            region -= junk || region > j ? random_between(&w->random, 1, 2) : 1;
        }
    }
    return lists;
}

void make_pages(page_case *p, int draw, bool junk)
{
    world *w = &p->w;
    world_make(w, random_shape((uint64_t)draw), (uint64_t)draw);
    if (junk)
        spoil_table(w);
    p->cache = one_group(w, random_between(&w->random, 0, w->shape.groups - 1));
    int64_t columns = random_between(&w->random, 1, 40);
    p->args = (csa_compat_pages_args){.size = sizeof p->args, .tokens = &w->step, .cache = &p->cache};
    p->args.selected = make_lists(w, columns, junk);
    p->args.page_indptr = arena_tensor(&w->memory, "indptr", &w->random, CSA_I32, 1, w->tokens + 1);
    p->args.page_counts = arena_tensor(&w->memory, "counts", &w->random, CSA_I32, 1, w->tokens);
    p->args.last_page_len = arena_tensor(&w->memory, "last", &w->random, CSA_I32, 1, w->tokens);
    p->args.pages = arena_tensor(&w->memory, "pages", &w->random, CSA_I32, 1, w->tokens * columns + 3);
}

int64_t used_entries(const world *w, int64_t token, int64_t columns)
{
    int64_t position = position_of(w, token);
    return position < 0 ? 0 : position / 8 + 1 < columns ? position / 8 + 1 : columns;
}

int64_t entry_block(const world *w, int64_t token, int64_t region)
{
    if (region < 0 || region > position_of(w, token) / 8)
        return -1;
    return block_of(&w->step.block_table, owner_of(w, token), region * 8 / w->shape.block_size, w->blocks);
}

bool pages_possible(const csa_tensor *kv)
{
    return kv->shape[0] < 2 || kv->stride[0] % (8 * kv->stride[2]) == 0;
}

csa_compat_gather_args make_gather(page_case *p)
{
    csa_compat_gather_args a = {.size = sizeof a, .tokens = &p->w.step, .cache = &p->cache};
    int64_t room = p->w.tokens * p->args.selected.shape[1] * 8;
    test_random *gaps = p->w.shape.strided ? &p->w.random : NULL;
    a.selected = p->args.selected;
    a.cu_k = arena_tensor(&p->w.memory, "cu_k", gaps, CSA_I32, 1, p->w.tokens + 1);
    a.key = arena_tensor(&p->w.memory, "key", gaps, CSA_BF16, 3, room, (int64_t)1, (int64_t)192);
    a.value = arena_tensor(&p->w.memory, "value", gaps, CSA_BF16, 3, room, (int64_t)1, (int64_t)192);
    return a;
}
