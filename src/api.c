/*
 * The stages of csa.h: argument checks, then dispatch to the context's back end.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "api.h"
#include "check.h"
#include "fetch.h"
#include "format.h"

csa_checker csa_begin(const csa_context *context, const char *call)
{
    csa_checker c = {.call = call};
    if (!context)
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "context is NULL");
    return c;
}

int32_t csa_check_topk(csa_checker *c, int32_t topk)
{
    csa_check_range(c, "topk", topk ? topk : CSA_DEFAULT_TOPK, 1, CSA_MAX_TOPK);
    return topk ? topk : CSA_DEFAULT_TOPK;
}

static csa_dim head_size(void)
{
    return CSA_FIXED_DIM("head size", CSA_HEAD_SIZE, "192");
}

static csa_dim index_size(void)
{
    return CSA_FIXED_DIM("index head size", CSA_SUMMARY_SIZE, "256");
}

static void check_groups(csa_checker *c, const csa_dim *groups)
{
    csa_check_range(c, "KV groups", groups->extent, 1, CSA_MAX_GROUPS);
}

/* ---- Prepare ------------------------------------------------------------------------------------ */

static void check_prepare_index(csa_checker *c, csa_prepare_args *a, csa_dim *tokens, csa_dim *groups)
{
    csa_dim heads = CSA_DIM("index heads per group"), size = index_size(), positions = CSA_DIM("positions");
    csa_dim padded = CSA_FIXED_DIM("padded index heads", CSA_INDEX_HEADS, "8");
    csa_dim rotary = CSA_FIXED_DIM("index rotary", CSA_INDEX_ROTARY, "32");
    csa_check_tensor(c, "index_query", &a->index_query, 0, CSA_BF16, 4, tokens, groups, &heads, &size);
    csa_check_tensor(c, "index_key", &a->index_key, 0, CSA_BF16, 2, tokens, &size);
    csa_check_tensor(c, "index_weights", &a->index_weights, 0, CSA_BF16, 3, tokens, groups, &heads);
    csa_check_tensor(c, "index_query_norm", &a->index_query_norm, 0, CSA_BF16, 1, &size);
    csa_check_tensor(c, "index_key_norm", &a->index_key_norm, 0, CSA_BF16, 1, &size);
    csa_check_tensor(c, "index_key_bias", &a->index_key_bias, 0, CSA_BF16, 1, &size);
    csa_check_tensor(c, "index_rope", &a->index_rope, 0, csa_either(&a->index_rope, CSA_BF16, CSA_F32), 2,
                     &positions, &rotary);
    csa_check_tensor(c, "index_query_out", &a->index_query_out, CSA_ARG_OUT, CSA_E4M3, 4, tokens, groups,
                     &padded, &size);
    csa_check_tensor(c, "index_key_out", &a->index_key_out, CSA_ARG_OUT, CSA_BF16, 2, tokens, &size);
    csa_check_tensor(c, "index_weights_out", &a->index_weights_out, CSA_ARG_OUT, CSA_F32, 3, tokens, groups,
                     &padded);
    if (c->status == CSA_OK && heads.extent != 2 && heads.extent != 4)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "index heads per group is %lld, supported: 2, 4",
                   (long long)heads.extent);
    check_groups(c, groups);
}

static void check_prepare_attention(csa_checker *c, csa_prepare_args *a, csa_dim *tokens, csa_dim *groups,
                                    bool cached)
{
    csa_dim heads = CSA_DIM("query heads per group"), size = head_size(), positions = CSA_DIM("positions"),
            rotary = CSA_DIM("rotary");
    csa_check_tensor(c, "query", &a->query, 0, CSA_BF16, 4, tokens, groups, &heads, &size);
    csa_check_tensor(c, "key", &a->key, 0, CSA_BF16, 3, tokens, groups, &size);
    csa_check_tensor(c, "value", &a->value, 0, CSA_BF16, 3, tokens, groups, &size);
    csa_check_tensor(c, "query_norm", &a->query_norm, 0, CSA_BF16, 1, &size);
    csa_check_tensor(c, "key_norm", &a->key_norm, 0, CSA_BF16, 1, &size);
    csa_check_tensor(c, "rope", &a->rope, CSA_ARG_OPTIONAL, csa_either(&a->rope, CSA_BF16, CSA_F32), 2,
                     &positions, &rotary);
    csa_check_tensor(c, "query_out", &a->query_out, CSA_ARG_OUT, CSA_BF16, 4, tokens, groups, &heads, &size);
    int optional = CSA_ARG_OUT | (cached ? CSA_ARG_OPTIONAL : 0);
    csa_check_tensor(c, "key_out", &a->key_out, optional, CSA_BF16, 3, tokens, groups, &size);
    csa_check_tensor(c, "value_out", &a->value_out, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_BF16, 3, tokens, groups,
                     &size);
    csa_check_range(c, "query heads per group", heads.extent, 1, CSA_MAX_HEADS);
    if (c->status == CSA_OK && (rotary.extent > CSA_HEAD_SIZE || rotary.extent % 2 == 1))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "rope: rotary is %lld, supported: even, 0 to 192",
                   (long long)rotary.extent);
    if (rotary.extent == 0)
        a->rope = (csa_tensor){0}; /* not read, whatever its positions */
}

void csa_check_prepare(csa_checker *c, const csa_prepare_args *from, csa_prepare_call *to)
{
    csa_prepare_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups");
    csa_take(c, a, from, sizeof *a, "csa_prepare_args");
    check_prepare_index(c, a, &tokens, &groups);
    if (a->cache) {
        csa_check_cache(c, a->cache, 0, &groups, &to->nested.cache);
        a->cache = &to->nested.cache;
    }
    bool cached = csa_present(&a->query) && a->cache && csa_present(&a->cache->kv);
    csa_check_tokens(c, a->tokens, CSA_NEED_POSITIONS | (cached ? CSA_NEED_SLOTS : 0), &tokens,
                     &to->nested.tokens);
    if (csa_present(&a->query))
        check_prepare_attention(c, a, &tokens, &groups, cached);
    a->tokens = &to->nested.tokens;
}

csa_status csa_prepare(const csa_context *context, const csa_prepare_args *args)
{
    csa_prepare_call call;
    csa_checker c = csa_begin(context, "csa_prepare");
    csa_check_prepare(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_prepare_ids(&c, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->prepare(context, &call.args) : c.status;
}

/* ---- Summarize ---------------------------------------------------------------------------------- */

void csa_check_ring(csa_checker *c, const csa_nested *n, int64_t query_len)
{
    int64_t least = query_len == 0 ? CSA_REGION - 1 : query_len < 2 ? CSA_REGION : CSA_REGION - 2 + query_len;
    if (!csa_present(&n->cache.ring)) {
        if (csa_present(&n->tokens.ring_base))
            csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.ring_base is given, but cache.ring is absent");
        return;
    }
    if (n->cache.ring_capacity < least)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "cache.ring_capacity is %lld, expected at least %lld%s",
                   (long long)n->cache.ring_capacity, (long long)least,
                   query_len ? ", max(8, 6 + query_len)" : "");
}

void csa_check_summarize(csa_checker *c, csa_op op, const csa_summarize_args *from, csa_summarize_call *to)
{
    csa_summarize_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups"), size = index_size();
    csa_dim columns = CSA_FIXED_DIM("metadata columns", CSA_RUN_COLUMNS, "10");
    bool metadata = op == CSA_OP_SUMMARIZE_METADATA, prefill = metadata || op == CSA_OP_SUMMARIZE_PREFILL;
    csa_take(c, a, from, sizeof *a, "csa_summarize_args");
    if (!metadata) {
        csa_check_tensor(c, "key", &a->key, 0, CSA_BF16, 2, &tokens, &size);
        csa_check_tensor(c, "z", &a->z, 0, CSA_BF16, 2, &tokens, &size);
        csa_check_cache(c, a->cache, CSA_NEED_SUMMARIES, &groups, &to->nested.cache);
    }
    if (prefill)
        csa_check_tensor(c, "metadata", &a->metadata, metadata ? CSA_ARG_OUT : CSA_ARG_OPTIONAL, CSA_I64, 2,
                         &tokens, &columns);
    int needs = CSA_NEED_SLOTS | CSA_NEED_POSITIONS | (prefill ? CSA_NEED_QUERY_START : 0);
    csa_check_tokens(c, a->tokens, needs, &tokens, &to->nested.tokens);
    csa_tokens *t = &to->nested.tokens;
    bool verify = op == CSA_OP_SUMMARIZE_VERIFY;
    if (op == CSA_OP_SUMMARIZE_DECODE && t->query_len != 1)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.query_len is %d, expected 1 in decode", (int)t->query_len);
    if (!metadata)
        csa_check_ring(c, &to->nested, verify ? t->query_len : 0);
    a->tokens = t;
    a->cache = &to->nested.cache;
}

static csa_status summarize(const csa_context *context, csa_op op, const char *name,
                            const csa_summarize_args *args)
{
    csa_summarize_call call = {0};
    csa_checker c = csa_begin(context, name);
    csa_check_summarize(&c, op, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_summarize_ids(&c, op, &call.args);
        csa_end_fetch(&ids);
    }
    if (c.status != CSA_OK)
        return c.status;
    switch (op) {
    case CSA_OP_SUMMARIZE_DECODE:
        return context->stages->summarize_decode(context, &call.args);
    case CSA_OP_SUMMARIZE_VERIFY:
        return context->stages->summarize_verify(context, &call.args);
    case CSA_OP_SUMMARIZE_PREFILL:
        return context->stages->summarize_prefill(context, &call.args);
    default:
        return context->stages->summarize_metadata(context, &call.args);
    }
}

csa_status csa_summarize_decode(const csa_context *context, const csa_summarize_args *args)
{
    return summarize(context, CSA_OP_SUMMARIZE_DECODE, "csa_summarize_decode", args);
}

csa_status csa_summarize_verify(const csa_context *context, const csa_summarize_args *args)
{
    return summarize(context, CSA_OP_SUMMARIZE_VERIFY, "csa_summarize_verify", args);
}

csa_status csa_summarize_prefill(const csa_context *context, const csa_summarize_args *args)
{
    return summarize(context, CSA_OP_SUMMARIZE_PREFILL, "csa_summarize_prefill", args);
}

csa_status csa_summarize_metadata(const csa_context *context, const csa_summarize_args *args)
{
    return summarize(context, CSA_OP_SUMMARIZE_METADATA, "csa_summarize_metadata", args);
}

/* ---- Score -------------------------------------------------------------------------------------- */

void csa_check_index(csa_checker *c, csa_tensor *query, csa_tensor *weights, csa_dim *tokens, csa_dim *groups)
{
    csa_dim heads = CSA_DIM("index heads per group"), size = index_size();
    csa_check_tensor(c, "index query", query, 0, CSA_E4M3, 4, tokens, groups, &heads, &size);
    csa_check_tensor(c, "index weights", weights, 0, CSA_F32, 3, tokens, groups, &heads);
    check_groups(c, groups);
    if (c->status == CSA_OK && heads.extent != 16 && (heads.extent < 1 || heads.extent > 8))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "index heads per group is %lld, supported: 1 to 8, 16",
                   (long long)heads.extent);
}

void csa_check_score(csa_checker *c, const csa_score_args *from, csa_score_call *to)
{
    csa_score_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups"), regions = CSA_DIM("regions");
    csa_take(c, a, from, sizeof *a, "csa_score_args");
    csa_check_index(c, &a->query, &a->weights, &tokens, &groups);
    csa_dim rows = csa_rows_dim(&tokens, &groups);
    csa_check_tensor(c, "scores", &a->scores, CSA_ARG_OUT, CSA_F32, 2, &rows, &regions);
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE | CSA_NEED_POSITIONS, &tokens, &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_SUMMARIES, &groups, &to->nested.cache);
    csa_check_rows(c, a->rows_out, CSA_ARG_OUT, &tokens, &groups, &to->nested.rows);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
    a->rows_out = a->rows_out ? &to->nested.rows : NULL;
}

csa_status csa_score(const csa_context *context, const csa_score_args *args)
{
    csa_score_call call;
    csa_checker c = csa_begin(context, "csa_score");
    csa_check_score(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_check_seen_ids(&c, call.args.tokens, &call.args.cache->summaries, call.args.query.shape[0],
                           call.args.scores.shape[1]);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->score(context, &call.args) : c.status;
}

/* ---- Select ------------------------------------------------------------------------------------- */

void csa_check_select(csa_checker *c, const csa_select_args *from, csa_select_args *to)
{
    csa_dim rows = CSA_DIM("rows"), regions = CSA_DIM("regions");
    csa_take(c, to, from, sizeof *to, "csa_select_args");
    to->topk = csa_check_topk(c, to->topk);
    int flags = to->scores.shape[1] <= to->topk ? CSA_ARG_NO_DATA : 0;
    csa_check_tensor(c, "scores", &to->scores, flags, CSA_F32, 2, &rows, &regions);
    csa_check_tensor(c, "current", &to->current, 0, CSA_I64, 1, &rows);
    int64_t width = regions.extent < to->topk ? regions.extent : to->topk;
    csa_dim columns = CSA_KNOWN_DIM("columns", width + 1, "min(topk, regions) + 1");
    csa_check_tensor(c, "selected", &to->selected, CSA_ARG_OUT, CSA_I64, 2, &rows, &columns);
}

csa_status csa_select(const csa_context *context, const csa_select_args *args)
{
    csa_select_args a;
    csa_checker c = csa_begin(context, "csa_select");
    csa_check_select(&c, args, &a);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, a.stream)) {
        csa_fetch(&ids, &a.current);
        csa_check_select_ids(&c, &a);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->select(context, &a) : c.status;
}

/* ---- Attend and gate ---------------------------------------------------------------------------- */

void csa_check_attention(csa_checker *c, csa_tensor *query, csa_tensor *gate, csa_tensor *out, csa_tensor *lse,
                         csa_dim *tokens, csa_dim *groups)
{
    csa_dim heads = CSA_DIM("query heads per group"), size = head_size();
    csa_check_tensor(c, "query", query, 0, CSA_BF16, 4, tokens, groups, &heads, &size);
    csa_check_tensor(c, "gate", gate, CSA_ARG_OPTIONAL, CSA_BF16, 3, tokens, groups, &heads);
    csa_check_tensor(c, "out", out, CSA_ARG_OUT, CSA_BF16, 4, tokens, groups, &heads, &size);
    csa_check_tensor(c, "lse", lse, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_F32, 3, tokens, groups, &heads);
    csa_check_range(c, "query heads per group", heads.extent, 1, CSA_MAX_HEADS);
    check_groups(c, groups);
}

enum { WORKSPACE_ALIGNMENT = 256 };

void csa_check_workspace(csa_checker *c, csa_workspace workspace, size_t needed)
{
    if (c->status != CSA_OK || needed == 0)
        return;
    if (workspace.bytes < needed)
        csa_refuse(c, CSA_ERROR_WORKSPACE, "workspace has %zu bytes, this step needs %zu", workspace.bytes,
                   needed);
    else if (!workspace.data)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "workspace.data is NULL");
    else if ((uintptr_t)workspace.data % WORKSPACE_ALIGNMENT)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "workspace.data %p is not aligned to %d bytes", workspace.data,
                   WORKSPACE_ALIGNMENT);
}

void csa_check_attend(csa_checker *c, const csa_attend_args *from, csa_attend_call *to)
{
    csa_attend_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups"), columns = CSA_DIM("columns");
    csa_take(c, a, from, sizeof *a, "csa_attend_args");
    csa_check_attention(c, &a->query, &a->gate, &a->out, &a->lse, &tokens, &groups);
    csa_dim rows = csa_rows_dim(&tokens, &groups);
    csa_check_tensor(c, "selected", &a->selected, 0, CSA_I64, 2, &rows, &columns);
    csa_check_range(c, "selected: columns", columns.extent, 1, CSA_MAX_TOPK + 1);
    csa_check_rows(c, a->rows, 0, &tokens, &groups, &to->nested.rows);
    if (a->rows && (!csa_present(&to->nested.rows.active) || !csa_present(&to->nested.rows.positions)))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "rows.active or rows.positions is absent");
    int needs = CSA_NEED_TABLE | (a->rows ? 0 : CSA_NEED_POSITIONS);
    csa_check_tokens(c, a->tokens, needs, &tokens, &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_KV, &groups, &to->nested.cache);
    csa_check_workspace(c, a->workspace, a->workspace.bytes);
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
    a->rows = a->rows ? &to->nested.rows : NULL;
}

csa_status csa_attend(const csa_context *context, const csa_attend_args *args)
{
    csa_attend_call call;
    csa_checker c = csa_begin(context, "csa_attend");
    csa_check_attend(&c, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        csa_fetch(&ids, &call.nested.rows.active);
        csa_fetch(&ids, &call.nested.rows.positions);
        csa_fetch(&ids, &call.args.selected);
        csa_check_attend_ids(&c, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->attend(context, &call.args) : c.status;
}

void csa_check_gate(csa_checker *c, const csa_gate_args *from, csa_gate_args *to)
{
    csa_dim tokens = CSA_DIM("tokens"), heads = CSA_DIM("heads"), size = head_size();
    csa_take(c, to, from, sizeof *to, "csa_gate_args");
    csa_check_tensor(c, "attention", &to->attention, 0, CSA_BF16, 3, &tokens, &heads, &size);
    csa_check_tensor(c, "gate", &to->gate, 0, CSA_BF16, 2, &tokens, &heads);
    csa_check_tensor(c, "active", &to->active, CSA_ARG_OPTIONAL, CSA_BOOL, 1, &tokens);
    csa_check_tensor(c, "out", &to->out, CSA_ARG_OUT, CSA_BF16, 3, &tokens, &heads, &size);
    csa_check_range(c, "heads", heads.extent, 1, (int64_t)CSA_MAX_GROUPS * CSA_MAX_HEADS);
}

csa_status csa_gate(const csa_context *context, const csa_gate_args *args)
{
    csa_gate_args a;
    csa_checker c = csa_begin(context, "csa_gate");
    csa_check_gate(&c, args, &a);
    return c.status == CSA_OK ? context->stages->gate(context, &a) : c.status;
}
