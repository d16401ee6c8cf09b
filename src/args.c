/* SPDX-License-Identifier: Apache-2.0 */
#include "args.h"
#include "tokens.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Keeps products of extents and groups far from overflow. */
static const int64_t max_extent = (int64_t)1 << 40;

void csa_refuse(csa_checker *c, csa_status status, const char *format, ...)
{
    if (c->status != CSA_OK)
        return;
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    c->status = csa_fail(status, "%s: %s", c->call, text);
}

void csa_take(csa_checker *c, void *to, const void *from, size_t known, const char *type)
{
    memset(to, 0, known);
    if (c->status != CSA_OK)
        return;
    if (!from) {
        csa_refuse(c, CSA_ERROR_ARGUMENT, "the %s is NULL", type);
        return;
    }
    size_t size = *(const size_t *)from;
    if (size < sizeof size || size > 65536) {
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s.size is %zu, expected sizeof(%s), which is %zu", type, size, type,
                   known);
        return;
    }
    for (size_t i = known; i < size; i++)
        if (((const char *)from)[i]) {
            csa_refuse(c, CSA_ERROR_UNSUPPORTED, "%s uses a field at byte %zu, unknown to version %s", type, i,
                       csa_version_string());
            return;
        }
    memcpy(to, from, size < known ? size : known);
    *(size_t *)to = known;
}

void csa_check_range(csa_checker *c, const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "%s is %lld, supported: %lld to %lld", name, (long long)value,
                   (long long)low, (long long)high);
}

/* ---- Tensors ------------------------------------------------------------------------------------ */

static const char *dtype_name(csa_dtype dtype)
{
    switch (dtype) {
    case CSA_I32:
        return "int32";
    case CSA_I64:
        return "int64";
    case CSA_U8:
        return "uint8";
    case CSA_F32:
        return "fp32";
    case CSA_BF16:
        return "bf16";
    case CSA_DTYPE(2, 16):
        return "fp16";
    case CSA_BOOL:
        return "bool";
    case CSA_E4M3:
        return "e4m3";
    default:
        return "unknown";
    }
}

csa_dtype csa_either(const csa_tensor *t, csa_dtype first, csa_dtype second)
{
    return t->dtype == second ? second : first;
}

static void check_dtype(csa_checker *c, const char *name, csa_tensor *t, csa_dtype dtype)
{
    if (t->dtype == CSA_U8 && (dtype == CSA_E4M3 || dtype == CSA_BOOL))
        t->dtype = dtype;
    if (t->dtype != dtype)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: dtype is %s (0x%x), expected %s", name, dtype_name(t->dtype),
                   (unsigned)t->dtype, dtype_name(dtype));
}

static void check_extent(csa_checker *c, const char *name, const csa_tensor *t, int i, csa_dim *dim)
{
    int64_t extent = t->shape[i];
    if (extent < 0 || extent > max_extent)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: extent %d (%s) is %lld, expected 0 to %lld", name, i, dim->name,
                   (long long)extent, (long long)max_extent);
    else if (dim->extent < 0)
        *dim = CSA_KNOWN_DIM(dim->name, extent, name);
    else if (extent != dim->extent && dim->allowed)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "%s: extent %d (%s) is %lld, supported: %s", name, i, dim->name,
                   (long long)extent, dim->allowed);
    else if (extent != dim->extent)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: extent %d (%s) is %lld, expected %lld (from %s)", name, i,
                   dim->name, (long long)extent, (long long)dim->extent, dim->source);
}

static bool empty(const csa_tensor *t)
{
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0)
            return true;
    return false;
}

/* Bytes between the first and the last element, -1 if that overflows. */
static int64_t span(const csa_tensor *t)
{
    int64_t sum = 0, step;
    for (int i = 0; i < t->ndim; i++) {
        int64_t stride = t->stride[i];
        if (stride == INT64_MIN ||
            __builtin_mul_overflow(t->shape[i] - 1, stride < 0 ? -stride : stride, &step) ||
            __builtin_add_overflow(sum, step, &sum))
            return -1;
    }
    return __builtin_mul_overflow(sum, csa_itemsize(t->dtype), &sum) || sum > INT64_MAX / 4 ? -1 : sum;
}

/* Do no two elements share memory? Sufficient: each stride steps over all that smaller strides reach. */
static bool apart(const csa_tensor *t)
{
    int64_t reach = 0;
    bool used[CSA_MAX_DIMS] = {false};
    for (int n = 0; n < t->ndim; n++) {
        int smallest = -1;
        for (int i = 0; i < t->ndim; i++)
            if (!used[i] && (smallest < 0 || llabs(t->stride[i]) < llabs(t->stride[smallest])))
                smallest = i;
        used[smallest] = true;
        if (t->shape[smallest] > 1 && llabs(t->stride[smallest]) <= reach)
            return false;
        reach += (t->shape[smallest] - 1) * llabs(t->stride[smallest]);
    }
    return true;
}

/* Strides and data, once dtype and shape are right. */
static void check_memory(csa_checker *c, const char *name, csa_tensor *t, int flags)
{
    for (int i = 0; i < CSA_MAX_DIMS; i++)
        if (i >= t->ndim || t->shape[i] <= 1)
            t->stride[i] = 0;
    if (empty(t))
        return;
    int last = t->ndim - 1;
    if (t->ndim > 1 && t->shape[last] > 1 && t->stride[last] != 1)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: stride %d is %lld, expected 1", name, last,
                   (long long)t->stride[last]);
    else if (span(t) < 0)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: its strides reach beyond the address space", name);
    else if (flags & CSA_ARG_OUT && !apart(t))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: elements of this output overlap", name);
    else if (!t->data && !(flags & CSA_ARG_NO_DATA))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: data is NULL", name);
    else if ((uintptr_t)t->data % (uintptr_t)csa_itemsize(t->dtype))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: data %p is not aligned to its %lld-byte elements", name, t->data,
                   (long long)csa_itemsize(t->dtype));
}

void csa_check_tensor(csa_checker *c, const char *name, csa_tensor *t, int flags, csa_dtype dtype, int ndim,
                      ...)
{
    if (c->status != CSA_OK)
        return;
    if (t->ndim == 0) {
        memset(t, 0, sizeof *t);
        if (!(flags & CSA_ARG_OPTIONAL))
            csa_refuse(c, CSA_ERROR_ARGUMENT, "%s is absent", name);
        return;
    }
    if (t->ndim != ndim) {
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s: ndim is %d, expected %d", name, t->ndim, ndim);
        return;
    }
    check_dtype(c, name, t, dtype);
    va_list dims;
    va_start(dims, ndim);
    for (int i = 0; i < ndim; i++)
        check_extent(c, name, t, i, va_arg(dims, csa_dim *));
    va_end(dims);
    if (c->status == CSA_OK)
        check_memory(c, name, t, flags);
}

/* ---- Tokens, cache, rows ------------------------------------------------------------------------ */

csa_dim csa_rows_dim(const csa_dim *tokens, const csa_dim *groups)
{
    int64_t rows; /* groups may be any number if they have been refused */
    if (__builtin_mul_overflow(tokens->extent, groups->extent, &rows))
        rows = INT64_MAX;
    return CSA_KNOWN_DIM("rows", rows, "tokens * groups");
}

static void need(csa_checker *c, int needs, int which, bool present, const char *name)
{
    if (needs & which && !present)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%s is absent", name);
}

void csa_check_tokens(csa_checker *c, const csa_tokens *from, int needs, csa_dim *tokens, csa_tokens *to)
{
    csa_dim requests = CSA_DIM("requests"), columns = CSA_DIM("columns"), ends = CSA_DIM("requests + 1");
    csa_take(c, to, from, sizeof *to, "csa_tokens");
    if (to->query_len == 0)
        to->query_len = 1;
    csa_check_tensor(c, "tokens.block_table", &to->block_table, CSA_ARG_OPTIONAL, CSA_I32, 2, &requests,
                     &columns);
    csa_check_tensor(c, "tokens.slots", &to->slots, CSA_ARG_OPTIONAL, CSA_I64, 1, tokens);
    csa_check_tensor(c, "tokens.positions", &to->positions, CSA_ARG_OPTIONAL, CSA_I64, 1, tokens);
    csa_check_tensor(c, "tokens.owners", &to->owners, CSA_ARG_OPTIONAL, CSA_I64, 1, tokens);
    csa_check_tensor(c, "tokens.seq_lens", &to->seq_lens, CSA_ARG_OPTIONAL, CSA_I32, 1, &requests);
    csa_check_tensor(c, "tokens.ring_base", &to->ring_base, CSA_ARG_OPTIONAL, CSA_I64, 1, &requests);
    if (requests.extent >= 0)
        ends = CSA_KNOWN_DIM("requests + 1", requests.extent + 1, requests.source);
    csa_check_tensor(c, "tokens.query_start", &to->query_start, CSA_ARG_OPTIONAL, CSA_I32, 1, &ends);
    if (csa_present(&to->query_start) && to->query_start.shape[0] == 0)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.query_start: extent 0 (requests + 1) is 0");
    csa_check_range(c, "tokens.query_len", to->query_len, 1, INT32_MAX);
    need(c, needs, CSA_NEED_TABLE, csa_present(&to->block_table), "tokens.block_table");
    need(c, needs, CSA_NEED_SLOTS, csa_present(&to->slots), "tokens.slots");
    need(c, needs, CSA_NEED_POSITIONS, csa_present(&to->positions) || csa_present(&to->seq_lens),
         "tokens.positions (or seq_lens)");
    need(c, needs, CSA_NEED_QUERY_START, csa_present(&to->query_start), "tokens.query_start");
    bool counted = !csa_present(&to->owners) && !csa_present(&to->query_start) && csa_token_requests(to) > 0;
    int64_t expected; /* requests of an empty table are not bounded by memory */
    if (__builtin_mul_overflow(csa_token_requests(to), (int64_t)to->query_len, &expected))
        expected = INT64_MAX;
    if (counted && tokens->extent >= 0 && tokens->extent != expected)
        csa_refuse(c, CSA_ERROR_ARGUMENT,
                   "%lld tokens (from %s), expected requests * query_len = %lld without owners and query_start",
                   (long long)tokens->extent, tokens->source, (long long)expected);
}

static void check_per_block(csa_checker *c, const char *name, int64_t block_size)
{
    if (c->status == CSA_OK && block_size != 16 && block_size != 32 && block_size != 64 && block_size != 128)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "%s: block size is %lld, supported: 16, 32, 64, 128", name,
                   (long long)block_size);
}

void csa_check_cache(csa_checker *c, const csa_cache *from, int needs, csa_dim *groups, csa_cache *to)
{
    csa_dim blocks = CSA_DIM("blocks"), block_size = CSA_DIM("block size"),
            per_block = CSA_DIM("block size / 8"), ring_rows = CSA_DIM("ring rows");
    csa_dim row = CSA_FIXED_DIM("cache row", CSA_KV_SIZE, "384, a key and a value of 192");
    csa_dim summary = CSA_FIXED_DIM("summary size", CSA_SUMMARY_SIZE, "256");
    csa_dim ring_row = CSA_FIXED_DIM("ring row", CSA_RING_SIZE, "512");
    csa_take(c, to, from, sizeof *to, "csa_cache");
    if (to->kv.ndim != 0 && to->kv.dtype != CSA_BF16 && to->kv.dtype != CSA_E4M3 && to->kv.dtype != CSA_U8)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "cache.kv: dtype is %s (0x%x), expected bf16 or e4m3",
                   dtype_name(to->kv.dtype), (unsigned)to->kv.dtype);
    csa_dtype kv_dtype = csa_either(&to->kv, CSA_E4M3, CSA_BF16); /* a text about e4m3 for all else */
    csa_check_tensor(c, "cache.kv", &to->kv, CSA_ARG_OPTIONAL | CSA_ARG_OUT, kv_dtype, 4, &blocks, groups,
                     &block_size, &row);
    if (csa_present(&to->kv)) {
        check_per_block(c, "cache.kv", block_size.extent);
        per_block = CSA_KNOWN_DIM("block size / 8", block_size.extent / CSA_REGION, "cache.kv");
    }
    csa_check_tensor(c, "cache.summaries", &to->summaries, CSA_ARG_OPTIONAL | CSA_ARG_OUT, CSA_E4M3, 3, &blocks,
                     &per_block, &summary);
    if (csa_present(&to->summaries))
        check_per_block(c, "cache.summaries", per_block.extent * CSA_REGION);
    csa_check_tensor(c, "cache.ring", &to->ring, CSA_ARG_OPTIONAL | CSA_ARG_OUT, CSA_BF16, 2, &ring_rows,
                     &ring_row);
    need(c, needs, CSA_NEED_KV, csa_present(&to->kv), "cache.kv");
    need(c, needs, CSA_NEED_SUMMARIES, csa_present(&to->summaries), "cache.summaries");
    if ((uintptr_t)to->k_scale % sizeof(float) || (uintptr_t)to->v_scale % sizeof(float))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "cache.k_scale or v_scale is not aligned to 4 bytes");
}

void csa_check_rows(csa_checker *c, const csa_rows *from, int flags, const csa_dim *tokens,
                    const csa_dim *groups, csa_rows *to)
{
    memset(to, 0, sizeof *to);
    if (!from)
        return;
    csa_dim rows = csa_rows_dim(tokens, groups);
    flags |= CSA_ARG_OPTIONAL;
    csa_take(c, to, from, sizeof *to, "csa_rows");
    csa_check_tensor(c, "rows.active", &to->active, flags, CSA_BOOL, 1, &rows);
    csa_check_tensor(c, "rows.positions", &to->positions, flags, CSA_I64, 1, &rows);
    csa_check_tensor(c, "rows.current", &to->current, flags, CSA_I64, 1, &rows);
    csa_check_tensor(c, "rows.lengths", &to->lengths, flags, CSA_I32, 1, &rows);
    csa_check_tensor(c, "rows.topk_lengths", &to->topk_lengths, flags, CSA_I32, 1, &rows);
}
