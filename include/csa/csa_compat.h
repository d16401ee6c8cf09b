/*
 * The reference's formats and plans (docs/SPEC.md, section 9), so that an engine can swap one call at a time.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Our own steps (csa_decode, csa_prefill, csa_layer) read summaries and KV in place and need none of this. Here
 * are the copies and lists that the reference puts in between:
 *
 *     scores     csa_compat_pack -> packed pages, page table -> csa_compat_score -> csa_select
 *     attention  csa_compat_pages -> page lists -> csa_compat_attend_paged
 *                csa_compat_gather -> K and V, row after row -> csa_compat_attend_ragged
 *                csa_compat_stage -> a dense cache and its table -> any of them, on that
 *
 * docs/REFERENCE.md says which of the reference's calls each one replaces. All rules of csa.h hold:
 * descriptors, views, checks, ids, aliasing, threads, streams, captures. Moreover:
 *
 * - A row is a token: these forms take one KV group per call. The cache's kv is a view of one group,
 *   [blocks, 1, block_size, 384] (csa_tensor_4d over all groups, then data moved on and shape[1] = 1); so are
 *   queries. `tokens` says where the rows stand and whose they are, as everywhere. A chunk of a step is a view
 *   of its rows.
 * - Some outputs have as many entries as the data says. The bound is given beside each; the tensor may be
 *   longer, and what lies past the entries is not written.
 * - Numbers of pages, rows and tokens stand in int32 lists; a call whose sizes could pass 2^31 - 1 there is
 *   refused as CSA_ERROR_UNSUPPORTED, whatever the data says.
 */
#ifndef CSA_CSA_COMPAT_H
#define CSA_CSA_COMPAT_H

#include "csa.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CSA_COMPAT_PAGE_REGIONS = 32,    /* summaries of a packed page */
    CSA_COMPAT_PAGE_BYTES = 8320,    /* 32 * 256 bytes of e4m3 keys, then 32 fp32 scales */
    CSA_COMPAT_SEGMENT = 256,        /* regions of a schedule's segment */
    CSA_COMPAT_RAGGED_ROWS = 32,     /* rows the reference gathers at a time: a suggestion, not a limit */
    CSA_COMPAT_STAGE_LIMIT = 1 << 29 /* bytes a staged group may take */
};

/* ---- Sizes: pure functions of the host ---------------------------------------------------------- */

/* Packed pages per request: 4 * ceil(regions / 128). Negative regions count as 0. */
CSA_API int64_t csa_compat_packed_pages(int64_t regions);

/* Rows of a prefill chunk: clamp(2^floor(log2(2^27 / (4 * N))), 256, 4096), N = regions rounded up to 256. */
CSA_API int64_t csa_compat_chunk_rows(int64_t regions);

/* May `blocks` live blocks of one group be staged? Their bf16 copies take at most 512 MiB. */
CSA_API bool csa_compat_stage_fits(int64_t blocks, int64_t block_size);

/* ---- Packed summaries --------------------------------------------------------------------------- */

/*
 * Copies each request's summaries, in the order of its regions, into pages of its own: page
 * request * pages + p holds regions [32 * p, 32 * p + 32), pages = csa_compat_packed_pages(regions). Bytes are
 * copied as they are. Keys are zero from region `regions` on and where the block is not in the table or not in
 * the cache; all scales are 1.
 *
 * The same call serves prefill and decode. Decode asks for the optional outputs, which like `live_only` need
 * where the tokens stand: positions or seq_lens (with query_start also slots or positions, so that the number
 * of tokens is known), and slots for padding. Row outputs have one entry per token; the tokens of a request
 * share its pages. Checking mode looks at the table only if one of these is asked for, since an entry that maps
 * nothing is legal.
 */
typedef struct csa_compat_pack_args {
    size_t size;
    const csa_tokens *tokens; /* block_table */
    const csa_cache *cache;   /* summaries */
    int64_t regions;
    bool live_only;    /* write only the pages below 4 * ceil(L / 128), L the largest length of the request's
                          tokens (at least 1): the others are left as they are. Without owners: a request's
                          tokens stand together */
    csa_tensor packed; /* u8 [requests * pages, 8320], out. The reference's [.., 32, 1, 260] is this */
    const csa_rows *rows_out; /* may be NULL: [T] each */
    csa_tensor page_table;    /* int32 [T, pages], out, optional: request * pages + page; a token past the
                                 last query_start gets -1 */
    csa_tensor schedule;      /* int32 [workers + 1, 2], out, optional: csa_compat_schedule of
                                 rows_out->lengths, which it needs */
    void *stream;
} csa_compat_pack_args;

CSA_API csa_status csa_compat_pack(const csa_context *context, const csa_compat_pack_args *args);

/* ---- Schedule ----------------------------------------------------------------------------------- */

/*
 * Cuts rows into segments of 256 regions and shares them out: worker i starts at segment
 * i * (total / workers) + min(i, total % workers), given as (row, segment within the row). Rows without
 * segments (a length of 0 or less) are skipped; a start past the end is (rows, 0). Our csa_compat_score needs
 * none; this is for the reference's.
 */
typedef struct csa_compat_schedule_args {
    size_t size;
    csa_tensor lengths;  /* int32 [rows] */
    csa_tensor schedule; /* int32 [workers + 1, 2], out; 1 worker or more */
    void *stream;
} csa_compat_schedule_args;

CSA_API csa_status csa_compat_schedule(const csa_context *context, const csa_compat_schedule_args *args);

/* ---- Paged scores ------------------------------------------------------------------------------- */

/*
 * Section 4's score of each region from its packed page, times the key's scale, and -inf from the length on:
 * all of scores is written. A page that is not in the table, negative or past `packed` scores 0.
 *
 * With next_n = 2, entry i holds rows 2i and 2i + 1, two consecutive tokens of one request; that they are is
 * up to the caller. Table and length are those of the second row, so the first row has real scores past its
 * own length, and csa_select goes by each row's own `current`. csa_compat_pair makes the views.
 */
typedef struct csa_compat_score_args {
    size_t size;
    csa_tensor query;      /* e4m3, bf16 or fp32 [batch, next_n, heads, 256]; next_n 1 or 2; 1 to 8 heads or
                              16. u8 is e4m3; the others are converted to e4m3 first, saturating */
    csa_tensor weights;    /* fp32 [batch, next_n, heads] */
    csa_tensor packed;     /* u8 [packed pages, 8320] */
    csa_tensor page_table; /* int32 [batch, pages], pages of any number */
    csa_tensor lengths;    /* int32 [batch] */
    csa_tensor scores;     /* fp32 [batch * next_n, regions], out */
    void *stream;
} csa_compat_score_args;

CSA_API csa_status csa_compat_score(const csa_context *context, const csa_compat_score_args *args);

/*
 * Turns the views of a next_n = 1 call into those of the next_n = 2 call over the same memory: entry i gets
 * rows 2i and 2i + 1, table and length of the latter. Nothing is copied, no data is read. The rows must be
 * even in number. The views for a schedule are then `lengths`. To score 4 real heads of 8 padded ones, set
 * shape[2] of query and weights to 4 before or after: the bits are the same. Fails without a change.
 */
CSA_API csa_status csa_compat_pair(csa_compat_score_args *args);

/* ---- Prefill metadata --------------------------------------------------------------------------- */

/*
 * What scoring and selection of one chunk need (csa_compat_chunk_rows): tokens are a view of the chunk's rows.
 * If regions <= topk, everything is selected: `selected` is written, and page_table and schedule do not apply.
 * Otherwise page_table and schedule are written, rows counted from the chunk's start, and `selected` does not
 * apply. What does not apply must be absent, page_table may also be [T, 0].
 */
typedef struct csa_compat_metadata_args {
    size_t size;
    const csa_tokens *tokens; /* positions (or seq_lens), owners or query_start, slots for padding; of
                                 block_table only the number of requests is read: its data may be NULL with
                                 shape [requests, 0] */
    int64_t regions;
    int32_t topk;             /* 1 to 1024; 0: 512 */
    const csa_rows *rows_out; /* [T] each; may be NULL. `selected` needs current, schedule lengths */
    csa_tensor selected;      /* int64 [T, regions + 1], out, optional */
    csa_tensor page_table;    /* int32 [T, pages], out, optional: owner * pages + page, pages =
                                 csa_compat_packed_pages(regions); a token of no request gets -1 */
    csa_tensor schedule;      /* int32 [workers + 1, 2], out, optional */
    void *stream;
} csa_compat_metadata_args;

CSA_API csa_status csa_compat_prefill_metadata(const csa_context *context,
                                               const csa_compat_metadata_args *args);

/* ---- Page lists of a selection ------------------------------------------------------------------ */

/* CSA_OK if csa_compat_attend_paged can run on this group of a cache with that many query heads: bf16 kv,
 * 8 or 16 heads, a block stride that is a multiple of eight token rows. CSA_ERROR_UNSUPPORTED if not (use the
 * ragged form), the reason in csa_last_error. No data is read. */
CSA_API csa_status csa_compat_paged_supported(const csa_context *context, const csa_cache *cache,
                                              int64_t heads);

/*
 * A row's selection as a list of 8-token pages of its cache: entry e of the list is page
 *     block * (block stride / 8 token rows) + region % (block_size / 8),
 * which starts 8 * stride[2] * page elements past kv.data. A row has min(position / 8 + 1, W) pages, those of
 * the last entries of its list; an inactive row has none. The last page, which must be the row's current
 * region's (csa_select sees to that), holds last_page_len = position % 8 + 1 tokens (inactive: 0), the others
 * eight. An entry that csa_attend would skip (negative, past the position, its block not in the table or the
 * cache; owner of no request) gets page 0, whose tokens then count.
 *
 * Used in one of three ways:
 *   at once   everything: counts, their prefix sums, last lengths and pages;
 *   to plan   without `selected` and `pages`: positions may be upper bounds. page_indptr then says where each
 *             row's pages will stand;
 *   planned   `planned` set: page_indptr is read, not written. Counts and last lengths are replaced by the true
 *             ones (the fix-up) and the pages, if asked for, stand where the plan put them. Where a row needs
 *             more pages than were planned for it, or than `pages` has left from its place on, it gets as many
 *             as fit, those of its last entries (checking mode: an error).
 * Any cache dtype will do.
 */
typedef struct csa_compat_pages_args {
    size_t size;
    const csa_tokens *tokens; /* positions (or seq_lens), slots for padding; with pages also block_table and
                                 owners or query_start */
    const csa_cache *cache;   /* kv, one group; read only for pages */
    csa_tensor selected;      /* int64 [T, W]; with pages */
    int64_t columns;          /* W where selected is absent; 0: selected's */
    bool planned;
    csa_tensor page_indptr;   /* int32 [T + 1], out; planned: in */
    csa_tensor page_counts;   /* int32 [T], out, optional: differences of page_indptr unless planned */
    csa_tensor last_page_len; /* int32 [T], out, optional */
    csa_tensor pages;         /* int32, out, optional: T * W entries are always enough and, unless planned, the
                                 least that is accepted */
    void *stream;
} csa_compat_pages_args;

CSA_API csa_status csa_compat_pages(const csa_context *context, const csa_compat_pages_args *args);

/* ---- Attention over pages, attention over gathered rows ----------------------------------------- */

/*
 * Section 6's attention of each row to the tokens of its pages (csa_compat_pages). A page that is not within
 * the group's blocks, or an entry past `pages`, contributes no token; a row without one is 0, its log-sum-exp
 * -inf. Refused where csa_compat_paged_supported says so.
 */
typedef struct csa_compat_attend_paged_args {
    size_t size;
    const csa_cache *cache;   /* kv, one group: bf16 */
    csa_tensor query;         /* bf16 [rows, heads, 192], 8 or 16 heads */
    csa_tensor pages;         /* int32 [entries] */
    csa_tensor page_indptr;   /* int32 [rows + 1] */
    csa_tensor page_counts;   /* int32 [rows]; absent: differences of page_indptr */
    csa_tensor last_page_len; /* int32 [rows]: taken as within [0, 8] */
    csa_tensor out;           /* bf16 [rows, heads, 192], out; may be the same view as query */
    csa_tensor lse;           /* fp32 [rows, heads], out, optional: natural logarithms */
    float scale;              /* of q.k. 0 means 0 */
    void *stream;
} csa_compat_attend_paged_args;

CSA_API csa_status csa_compat_attend_paged(const csa_context *context,
                                           const csa_compat_attend_paged_args *args);

/*
 * K and V of each row's tokens, in the order of its list, row after row; which tokens these are is csa_attend's
 * rule. e4m3 becomes bf16(code * scale). key and value need at least T * W * 8 tokens; the reference takes 32
 * rows at a time to keep them small.
 */
typedef struct csa_compat_gather_args {
    size_t size;
    const csa_tokens *tokens; /* as in csa_attend */
    const csa_cache *cache;   /* kv, one group */
    csa_tensor selected;      /* int64 [T, W] */
    csa_tensor cu_k;          /* int32 [T + 1], out: first token of each row, then the end */
    csa_tensor key;           /* bf16 [tokens, 1, 192], out */
    csa_tensor value;         /* bf16 [tokens, 1, 192], out */
    void *stream;
} csa_compat_gather_args;

CSA_API csa_status csa_compat_gather(const csa_context *context, const csa_compat_gather_args *args);

/* Section 6's attention of row i to tokens [cu_k[i], cu_k[i + 1]), as far as key and value have them; a row
 * without one is 0, its log-sum-exp -inf. */
typedef struct csa_compat_attend_ragged_args {
    size_t size;
    csa_tensor query; /* bf16 [rows, heads, 192], 1 to 16 heads */
    csa_tensor cu_k;  /* int32 [rows + 1] */
    csa_tensor key;   /* bf16 [tokens, 1, 192] */
    csa_tensor value; /* bf16 [tokens, 1, 192] */
    csa_tensor out;   /* bf16 [rows, heads, 192], out; may be the same view as query */
    csa_tensor lse;   /* fp32 [rows, heads], out, optional: natural logarithms */
    float scale;      /* of q.k. 0 means 0 */
    void *stream;
} csa_compat_attend_ragged_args;

CSA_API csa_status csa_compat_attend_ragged(const csa_context *context,
                                            const csa_compat_attend_ragged_args *args);

/* ---- Staging ------------------------------------------------------------------------------------ */

/*
 * Copies the live blocks of every request, the first ceil(seq_len / block_size) of its table, into dense bf16
 * blocks in request order (e4m3 as bf16(code * scale)). The new table has their numbers, and 0 where there is
 * no block: past the live ones, and where the old one names none of the cache's. So unlike the old table it
 * cannot tell a missing block from block 0.
 *
 * There are at most n = the sum of min(ceil(seq_len / block_size), columns) blocks. With less room the rest is
 * not copied and its table entries are 0; staged_count still counts all (checking mode: an error). Room
 * for more than csa_compat_stage_fits allows is refused as CSA_ERROR_UNSUPPORTED: use the ragged form.
 */
typedef struct csa_compat_stage_args {
    size_t size;
    const csa_tokens *tokens; /* block_table and seq_lens */
    const csa_cache *cache;   /* kv, one group */
    csa_tensor staged;        /* bf16 [room, 1, block_size, 384], out */
    csa_tensor staged_pages;  /* int32 [room], out, optional: the block each was copied from */
    csa_tensor staged_table;  /* int32 [requests, columns], out */
    csa_tensor staged_count;  /* int32 [1], out, optional */
    void *stream;
} csa_compat_stage_args;

CSA_API csa_status csa_compat_stage(const csa_context *context, const csa_compat_stage_args *args);

#ifdef __cplusplus
}
#endif

#endif
