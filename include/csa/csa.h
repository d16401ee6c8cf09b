/*
 * libcsa - compressed sparse attention for inference engines.
 * SPDX-License-Identifier: Apache-2.0
 *
 * THE MODEL
 *
 * Attention over a long KV cache is cut down to the few hundred places that matter. Eight consecutive
 * tokens form a region. When a region's eighth token arrives, one 256-byte summary of it is written. A new
 * token scores the summaries of its request with a few index heads, keeps the best `topk` regions, and
 * attends to the tokens of those regions and of its own, still open region, straight from the paged cache:
 *
 *     prepare -> summarize -> score -> select -> attend (-> gate)
 *
 * docs/SPEC.md defines every operation; "section N" below refers to it.
 *
 * WHO OWNS WHAT
 *
 * The engine owns all memory: cache, inputs, outputs, workspace. The library keeps no pointer after a call
 * has returned (CUDA: after the work queued by the call has run), except that a plan holds its own copies.
 * For the host back ends (ref, cpu) every pointer is host memory; for cuda every tensor, `k_scale`,
 * `v_scale` and the workspace are device memory, while descriptors, plans and what is said to be "host" stay
 * on the host and may be reused as soon as the call returns.
 *
 * A request's whole state is: its length; its rows of the KV cache; its summaries (they live in the same
 * blocks); its tail ring rows [base, base + capacity). Copy those, fix the block table, and a request has
 * moved.
 *
 * A LAYER'S DECODE STEP
 *
 *     filled once a step, shared by all layers:
 *         csa_tokens tokens = {.size = sizeof tokens};
 *         tokens.block_table = csa_tensor_2d(table, CSA_I32, requests, columns);
 *         tokens.slots = csa_tensor_1d(slots, CSA_I64, requests);
 *         tokens.positions = csa_tensor_1d(positions, CSA_I64, requests);
 *         tokens.ring_base = csa_tensor_1d(base, CSA_I64, requests);
 *
 *     filled once a layer, at start:
 *         csa_cache cache = {.size = sizeof cache};
 *         cache.kv = csa_tensor_4d(kv, CSA_BF16, blocks, groups, block_size, CSA_KV_SIZE);
 *         cache.summaries = csa_tensor_3d(mean, CSA_E4M3, blocks, block_size / CSA_REGION, CSA_SUMMARY_SIZE);
 *         cache.ring = csa_tensor_2d(ring, CSA_BF16, requests * capacity, CSA_RING_SIZE);
 *         cache.ring_capacity = capacity;
 *
 *     per layer: projections in; queries, keys, weights and cache rows out; then everything up to the gate:
 *         csa_prepare_args prepare = {.size = sizeof prepare};
 *         prepare.tokens = &tokens; prepare.cache = &cache; prepare.eps = 1e-5F; ...
 *         csa_layer_args layer = {.size = sizeof layer};
 *         layer.prepare = &prepare; layer.z = ...; layer.out = ...;
 *         layer.scale = 1 / sqrtf(CSA_HEAD_SIZE); layer.workspace = workspace;
 *         status = csa_layer(context, NULL, &layer);
 *
 * or the same in separate calls: csa_prepare, csa_summarize_decode, csa_decode. docs/API.md goes through
 * decode, speculative verify, prefill and mixed batches; the README has a complete program.
 *
 * RULES FOR EVERY CALL
 *
 * - Descriptors start with their size: `csa_score_args a = {.size = sizeof a};` (C++: `csa_score_args a = {};
 *   a.size = sizeof a;`). That is their version: a smaller one comes from an older header, what it lacks is
 *   taken as zero; in a larger one, what the library does not know must be zero. Every other field may stay
 *   zero and then means the default given beside it; where 0 is a legal value, 0 means 0.
 * - Shapes, dtypes, strides and alignment are checked on every call, before anything is written. Extents
 *   with the same letter must agree. csa_last_error() then names the argument, its value and what would be
 *   accepted. No token, no row, no request is a legal call that does nothing.
 * - Ids (blocks, slots, ring rows, regions, owners) are bounds-checked in every mode: a bad one never makes
 *   the library read or write outside the tensors it was given. What it means instead is said at each
 *   call. A context made with `check` refuses it by name, before anything is written.
 * - Outputs must not overlap inputs or one another, unless a call says so; that is the caller's duty. What an
 *   output view does not cover (gaps between strides) is never written. Two active tokens with one slot or
 *   one ring row: which of them is stored is unspecified.
 * - No call allocates or prints. Creating contexts, planning and warming up may allocate, and on cuda contexts
 *   with `check` every call.
 * - A context is immutable after creation: threads may share it, each call with a workspace and outputs of
 *   its own, if the injected `parallel_for` (or OpenMP) may be entered by several threads at once. Calls that
 *   write the same cache, or share a workspace, must be ordered by the caller.
 * - The same call gives the same bits on any number of threads. A row's bits do not depend on the other rows
 *   of the call, nor on padding, block size or strides (prefill: under an invariant plan).
 * - Strings are UTF-8. All declarations are C11 and C++17.
 *
 * CUDA (for calls on a cuda context)
 *
 * - `stream` is a cudaStream_t of the context's device; NULL is the legacy default stream. Work is queued there
 *   and nothing waits for it. A fault of earlier work may be reported as CSA_ERROR_DEVICE. Should
 *   lengths or other tensors that a call reads change while it runs, it ends, but its results mean nothing.
 * - Any device may be the thread's current one: a call leaves it as it was. A context uses its device's primary
 *   context, so that streams of the runtime's and of the driver's API both fit.
 * - After csa_warm_up, every call on a context without `check` can be captured in a graph, in any capture mode.
 *   Frozen by capture: pointers, shapes, strides, scalars and the plan. Read at replay: the contents of
 *   tensors, the values at k_scale and v_scale. Extents are capacities: fill up with padding. A graph may
 *   outlive the context.
 * - A back end may ask for more alignment or regular strides and then refuses other views by name, with
 *   CSA_ERROR_UNSUPPORTED. Aligned to 16 bytes in base and strides is always enough. In the same way 2^31 rows
 *   or more are refused (tokens * groups, of the gate * heads) by score, select, attend, gate and whole steps.
 */
#ifndef CSA_CSA_H
#define CSA_CSA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CSA_VERSION_MAJOR 0
#define CSA_VERSION_MINOR 1
#define CSA_VERSION_PATCH 0
#define CSA_VERSION       (CSA_VERSION_MAJOR * 10000 + CSA_VERSION_MINOR * 100 + CSA_VERSION_PATCH)

#define CSA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sizes of the model (section 1). Others are refused until they are supported. --------------- */

enum {
    CSA_REGION = 8,         /* tokens of a region */
    CSA_HEAD_SIZE = 192,    /* values of a query, key or value head */
    CSA_KV_SIZE = 384,      /* values of a cache row: key, then value */
    CSA_SUMMARY_SIZE = 256, /* values of a summary, an index query head and an index key */
    CSA_RING_SIZE = 512,    /* values of a tail ring row: index key, then z */
    CSA_INDEX_ROTARY = 32,  /* rotated values of an index query or key */
    CSA_INDEX_HEADS = 8,    /* heads a group's prepared index query is padded to */
    CSA_MAX_GROUPS = 8,
    CSA_MAX_HEADS = 16, /* query heads of a KV group */
    CSA_MAX_TOPK = 1024,
    CSA_DEFAULT_TOPK = 512
};

/* ---- Status and version ------------------------------------------------------------------------- */

typedef enum csa_status {
    CSA_OK = 0,
    CSA_ERROR_ARGUMENT = 1,    /* a descriptor, shape, dtype, stride or alignment that cannot be right */
    CSA_ERROR_UNSUPPORTED = 2, /* meaningful, but not here: a size or a back end that is not supported */
    CSA_ERROR_WORKSPACE = 3,   /* the workspace is smaller than the call needs */
    CSA_ERROR_ID = 4,          /* checking mode: an id, length or position is out of range or contradictory */
    CSA_ERROR_MEMORY = 5,      /* an allocation failed (creation, planning, warm-up; checking mode on cuda) */
    CSA_ERROR_DEVICE = 6,      /* the device or its driver failed */
    CSA_ERROR_INTERNAL = 7
} csa_status;

/* A short name, such as "argument". Never NULL. */
CSA_API const char *csa_status_name(csa_status status);

/* Copies the calling thread's last error text into text[0..capacity), always ending it with a NUL, and
 * returns the length of the whole text without the NUL (0: no call failed in this thread yet). A call that
 * succeeds leaves the text as it is. text may be NULL if capacity is 0. */
CSA_API size_t csa_last_error(char *text, size_t capacity);

/* The version of the library that is running: CSA_VERSION of its header, and as text ("0.1.0"). */
CSA_API int csa_version(void);
CSA_API const char *csa_version_string(void);

/* ---- Tensors ------------------------------------------------------------------------------------ */

/* DLPack's DLDataType {code, bits, lanes = 1} as a little-endian 32-bit word. */
typedef uint32_t csa_dtype;
#define CSA_DTYPE(code, bits) ((code) | (bits) << 8 | 1 << 16)
enum {
    CSA_I32 = CSA_DTYPE(0, 32),
    CSA_I64 = CSA_DTYPE(0, 64),
    CSA_U8 = CSA_DTYPE(1, 8), /* accepted wherever e4m3 or bool is */
    CSA_F32 = CSA_DTYPE(2, 32),
    CSA_BF16 = CSA_DTYPE(4, 16),
    CSA_BOOL = CSA_DTYPE(6, 8),  /* 0 is false, anything else true; written as 0 or 1 */
    CSA_E4M3 = CSA_DTYPE(10, 8), /* FP8 E4M3FN */
    CSA_MAX_DIMS = 4
};

/* A view of memory the caller owns. Strides are in elements and are always read, except those of extents up to
 * 1; an input's may be 0 or negative, an output's must keep its elements apart; the last extent of a tensor of
 * two or more has unit stride. data is aligned to the element type and may be NULL where an extent is 0. With
 * ndim 0 the tensor is absent and nothing else of it is read. */
typedef struct csa_tensor {
    void *data; /* inputs are only read */
    csa_dtype dtype;
    int32_t ndim;
    int64_t shape[CSA_MAX_DIMS];
    int64_t stride[CSA_MAX_DIMS];
} csa_tensor;

/* Row-major views without gaps. */
static inline csa_tensor csa_tensor_4d(const void *data, csa_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                                       int64_t n3)
{
    csa_tensor t = {(void *)data, dtype, 4, {n0, n1, n2, n3}, {n1 * n2 * n3, n2 * n3, n3, 1}};
    return t;
}

static inline csa_tensor csa_tensor_3d(const void *data, csa_dtype dtype, int64_t n0, int64_t n1, int64_t n2)
{
    csa_tensor t = {(void *)data, dtype, 3, {n0, n1, n2, 0}, {n1 * n2, n2, 1, 0}};
    return t;
}

static inline csa_tensor csa_tensor_2d(const void *data, csa_dtype dtype, int64_t n0, int64_t n1)
{
    csa_tensor t = {(void *)data, dtype, 2, {n0, n1, 0, 0}, {n1, 1, 0, 0}};
    return t;
}

static inline csa_tensor csa_tensor_1d(const void *data, csa_dtype dtype, int64_t n0)
{
    csa_tensor t = {(void *)data, dtype, 1, {n0, 0, 0, 0}, {1, 0, 0, 0}};
    return t;
}

/* ---- Contexts ----------------------------------------------------------------------------------- */

typedef struct csa_context csa_context; /* a back end bound to a device, with its threads */
typedef struct csa_plan csa_plan;       /* the host's work for one prefill step */

typedef enum csa_backend {
    CSA_BACKEND_DEFAULT = 0, /* the fastest host back end of this build: see csa_backend_describe */
    CSA_BACKEND_REF = 1,     /* plain scalar C, the executable specification */
    CSA_BACKEND_CPU = 2,     /* vectorised for the processor it runs on */
    CSA_BACKEND_CUDA = 3
} csa_backend;

/* One piece of a call; pieces may run in any order and at once, never wait for each other, and may run on the
 * calling thread. A piece needs up to 512 KiB of stack. */
typedef void (*csa_task)(void *task_data, int32_t index);

/* Runs task(task_data, i) for each i in [0, count) exactly once and returns when all have returned. count is
 * at most csa_context_options.threads. Must not unwind; if a task was not run, the call fails with
 * CSA_ERROR_INTERNAL. */
typedef void (*csa_parallel_for)(void *pool, int32_t count, csa_task task, void *task_data);

/* Receives one line of information, from the thread that made the call. */
typedef void (*csa_log)(void *user, const char *line);

typedef struct csa_context_options {
    size_t size;
    csa_backend backend;
    int32_t device;  /* CUDA device number */
    int32_t threads; /* pieces a call is cut into; 0: as many as OpenMP would use. Needed with parallel_for */
    csa_parallel_for parallel_for; /* NULL: OpenMP */
    void *pool;                    /* handed to parallel_for */
    csa_log log;                   /* NULL: silence */
    void *log_user;
    bool check; /* checking mode: refuse bad ids by name, at some cost (CUDA: each call copies its ids to the
                   host, allocates memory for them until it returns, and waits for its stream) */
    size_t scratch_limit; /* bytes of scratch a step may use; 0: 128 MiB. Longer work runs in chunks of rows */
    const char *tier; /* cpu, cuda: the instruction sets to use, as csa_backend_describe lists them; NULL: the
                         best that the processor or device has */
} csa_context_options;

/* options may be NULL: all defaults. They are copied; the callbacks and what they use must stay valid until the
 * context is destroyed. *context is set to NULL on failure. */
CSA_API csa_status csa_context_create(const csa_context_options *options, csa_context **context);

/* The work queued through it must have finished. Its plans stay, to be destroyed. NULL is allowed. */
CSA_API void csa_context_destroy(csa_context *context);

/* Which back end a context runs (never CSA_BACKEND_DEFAULT), and on how many threads. NULL: CSA_BACKEND_DEFAULT
 * and 0; below, "none". */
CSA_API csa_backend csa_context_backend(const csa_context *context);
CSA_API int32_t csa_context_threads(const csa_context *context);

/* The instruction sets a cpu or cuda context uses, such as "avx512-bf16" or "sm90"; "none" for ref. */
CSA_API const char *csa_context_tier(const csa_context *context);

/* "ref", "cpu", "cuda" or "default". Never NULL. */
CSA_API const char *csa_backend_name(csa_backend backend);

/* CSA_OK if the back end can be used here, CSA_ERROR_UNSUPPORTED if not, CSA_ERROR_ARGUMENT if there is none of
 * that number; text gets one line that says what it is or why it is not available (less than 256 bytes; cut to
 * capacity). The default back end is described as what it stands for. */
CSA_API csa_status csa_backend_describe(csa_backend backend, char *text, size_t capacity);

/* One line on one of the devices that a back end can be given (csa_context_options.device), in the same way:
 * CSA_OK if it can be used, CSA_ERROR_UNSUPPORTED if not, CSA_ERROR_ARGUMENT if there is none of that number.
 * Host back ends have no devices. */
CSA_API csa_status csa_device_describe(csa_backend backend, int32_t device, char *text, size_t capacity);

/* ---- What calls share: the tokens of a step, the cache of a layer, the rows of a step ----------- */

/*
 * The tokens a step works on: T tokens of `requests` requests. Filled once a step, shared by all layers.
 *
 * Where each token stands can be said in two ways:
 *   by token    positions;
 *   by request  seq_lens: token i of a request with n tokens in this step stands at seq_len - n + i.
 * If both are given, positions are used.
 *
 * Which request a token belongs to: owners; else query_start; else token / query_len, and then T must be
 * requests * query_len. A token whose owner is not in [0, requests), or past the last query_start where that
 * decides, belongs to no request and sees no cache: its scores and its attention are 0.
 *
 * Padding: a token is inactive where its slot or its position is negative. Its other ids may be anything. It
 * may stand anywhere; prefill's summaries look at the position of a request's last token (section 3), so a
 * pad at the end of a request should keep its position there.
 *
 *     needs             block_table  slots  positions or seq_lens  ring_base  query_start
 *     prepare                        cache  yes
 *     summarize                      yes    yes                    yes        prefill; ragged verify
 *     score             yes          -      yes
 *     attend            yes          -      unless rows are given
 *     decode, prefill   yes          -      yes
 *     layer             yes          yes    yes                    yes        with a plan; ragged verify
 *
 * (-: only a slot's sign is read; where absent, every token is active. cache: if the cache is written.
 * ring_base absent: no request has a ring.) Views of a part of a step are fine: query_start counts from the
 * first token of the call.
 */
typedef struct csa_tokens {
    size_t size;
    csa_tensor block_table; /* int32 [requests, columns]: blocks of each request, in order */
    csa_tensor slots;     /* int64 [T]: block * block_size + offset, negative for padding; absent: all active */
    csa_tensor positions; /* int64 [T] */
    csa_tensor owners;    /* int64 [T] */
    csa_tensor seq_lens;  /* int32 [requests]: tokens of each request, this step's included */
    csa_tensor query_start; /* int32 [requests + 1]: first token of each request, then the end */
    csa_tensor ring_base;   /* int64 [requests]: first ring row, negative for none; absent: none has a ring */
    int32_t query_len;      /* tokens per request in decode and verify, drafts included; 0: 1. With
                               query_start: the most that any of them has. Prefill requests do not count */
} csa_tokens;

/*
 * One layer's cache. Filled once. Blocks and groups may be strided (a block may carry its summaries beside
 * its KV). Byte offsets may exceed 32 bits.
 */
typedef struct csa_cache {
    size_t size;
    csa_tensor kv;         /* bf16 or e4m3 [blocks, G, block_size, 384], block_size 16, 32, 64 or 128 */
    csa_tensor summaries;  /* e4m3 [blocks, block_size / 8, 256] */
    csa_tensor ring;       /* bf16 [ring rows, 512]: index key, then z, of each request's latest tokens */
    int64_t ring_capacity; /* ring rows per request: at least 7, with drafts max(8, 6 + query_len);
                              position p lives in row base + p % capacity */
    const float *k_scale;  /* e4m3 only: the true key is code * *k_scale; NULL: 1. Read when the step runs */
    const float *v_scale;
} csa_cache;

/*
 * What score, select and attend know of a row (section 4). A row is one (token, KV group) pair, number
 * token * G + group; R = T * G. Each tensor is optional as an output.
 */
typedef struct csa_rows {
    size_t size;
    csa_tensor active;       /* bool [R] */
    csa_tensor positions;    /* int64 [R]: 0 where inactive */
    csa_tensor current;      /* int64 [R]: position / 8 */
    csa_tensor lengths;      /* int32 [R]: current + 1 */
    csa_tensor topk_lengths; /* int32 [R]: current */
} csa_rows;

/* Scratch the caller lends to a call, aligned to 256 bytes; csa_workspace_size says how much a whole step needs
 * (csa_attend alone takes any amount). Its contents mean nothing to the caller, but on cuda a whole step's
 * needs csa_warm_up before its first use and nobody else to write it. */
typedef struct csa_workspace {
    void *data;
    size_t bytes;
} csa_workspace;

/* ---- Prepare (section 2): norm, RoPE, quantise, write the cache --------------------------------- */

/*
 * G groups of `heads` index heads (2 or 4) and of H query heads. The attention part (query, key, value and what
 * follows) may be absent as a whole.
 *
 * In-place: an output may be the very same view as its input of the same shape and dtype. An inactive token
 * is computed like any other and only not written to the cache. A position outside a table that is read (a
 * negative one, too) makes all outputs of the token zeros and, if the token is active, writes zeros to the
 * cache; in checking mode it is an error, unless the token is inactive. A slot past the cache writes nothing.
 *
 * A row of a RoPE table of R columns turns values i and i + R/2 (i < R/2) of each head by one angle: its cosine
 * is column i, its sine column i + R/2; x[i] * cosine - x[i + R/2] * sine, and x[i + R/2] * cosine + x[i] *
 * sine. Values from R on stay. The index part needs its table; without `rope` nothing of the attention part
 * turns.
 */
typedef struct csa_prepare_args {
    size_t size;
    const csa_tokens *tokens;
    const csa_cache *cache; /* kv is written at the tokens' slots; NULL or without kv: not written */

    csa_tensor index_query;       /* bf16 [T, G, heads, 256] */
    csa_tensor index_key;         /* bf16 [T, 256] */
    csa_tensor index_weights;     /* bf16 [T, G, heads] */
    csa_tensor index_query_norm;  /* bf16 [256]: RMS norm weight */
    csa_tensor index_key_norm;    /* bf16 [256]: layer norm weight */
    csa_tensor index_key_bias;    /* bf16 [256] */
    csa_tensor index_rope;        /* bf16 or fp32 [positions, 32]: 16 cosines, then 16 sines */
    csa_tensor index_query_out;   /* e4m3 [T, G, 8, 256]: heads past `heads` are zero */
    csa_tensor index_key_out;     /* bf16 [T, 256] */
    csa_tensor index_weights_out; /* fp32 [T, G, 8]: index_weights * heads^-0.5, the rest zero */

    csa_tensor query;      /* bf16 [T, G, H, 192] */
    csa_tensor key;        /* bf16 [T, G, 192] */
    csa_tensor value;      /* bf16 [T, G, 192] */
    csa_tensor query_norm; /* bf16 [192] */
    csa_tensor key_norm;   /* bf16 [192] */
    csa_tensor rope; /* bf16 or fp32 [positions, rotary]; absent: no rotation. rotary is even, at most 192 */
    csa_tensor query_out; /* bf16 [T, G, H, 192] */
    csa_tensor key_out;   /* bf16 [T, G, 192]; optional if the cache is written */
    csa_tensor value_out; /* bf16 [T, G, 192]; optional */

    float eps;          /* of all norms; 0 means 0 */
    bool zero_centered; /* norm weights of index query, query and key are stored less 1 */
    bool native_rope;   /* index query and key: each product of the rotation is rounded to bf16 first */
    void *stream;       /* CUDA stream; host back ends ignore it */
} csa_prepare_args;

CSA_API csa_status csa_prepare(const csa_context *context, const csa_prepare_args *args);

/* ---- Summarize (section 3): one summary per closed region --------------------------------------- */

/*
 * Needs the cache's summaries and, for requests that have one, the ring. key is what csa_prepare wrote to
 * index_key_out, z the layer's z projection. A slot past the summaries or a ring row past the ring writes
 * nothing; a region that would need such a ring row is not summarised. Without a ring, decode and verify
 * summarise nothing, and prefill only regions that begin in the call. A ring needs no initialisation for a
 * request that starts at a multiple of 8. Decode, verify and prefill steps of a request may alternate freely.
 */
typedef struct csa_summarize_args {
    size_t size;
    const csa_tokens *tokens;
    const csa_cache *cache;
    csa_tensor key;      /* bf16 [T, 256] */
    csa_tensor z;        /* bf16 [T, 256] */
    csa_tensor metadata; /* int64 [T, 10]: prefill only, see csa_summarize_metadata */
    void *stream;
} csa_summarize_args;

/* Decode: one token per request, T = requests. Ring capacity at least 7. */
CSA_API csa_status csa_summarize_decode(const csa_context *context, const csa_summarize_args *args);

/* Verify: query_len tokens per request, drafts included; with query_start, up to query_len. (Owners do not
 * decide here: a request's tokens stand together.) Ring capacity at least max(8, 6 + query_len). Up to
 * query_len - 1 rejected drafts are undone by the next step, which overwrites their rows and, when the region
 * closes again, its summary: nothing has to be called. */
CSA_API csa_status csa_summarize_verify(const csa_context *context, const csa_summarize_args *args);

/* Prefill: any number of tokens of many requests; a chunk may start anywhere. Positions of a request ascend
 * one by one. If metadata is present it is read instead of being found again: make it once a step, use it in
 * all layers. */
CSA_API csa_status csa_summarize_prefill(const csa_context *context, const csa_summarize_args *args);

/* Writes the metadata of prefill (section 3); key, z and cache are not read and may be absent. */
CSA_API csa_status csa_summarize_metadata(const csa_context *context, const csa_summarize_args *args);

/* ---- Score (section 4) -------------------------------------------------------------------------- */

/*
 * Scores of every region a row may see, in its own memory: scores[row, r] for r < min(lengths[row], regions),
 * where regions = scores.shape[1]; other entries are unspecified and may be written. Needs the cache's
 * summaries. A region whose block is not in the table or not in the cache scores 0.
 */
typedef struct csa_score_args {
    size_t size;
    const csa_tokens *tokens;
    const csa_cache *cache;
    csa_tensor query;         /* e4m3 [T, G, heads, 256], 1 to 8 heads or 16 */
    csa_tensor weights;       /* fp32 [T, G, heads] */
    csa_tensor scores;        /* fp32 [R, regions], out */
    const csa_rows *rows_out; /* may be NULL */
    void *stream;
} csa_score_args;

CSA_API csa_status csa_score(const csa_context *context, const csa_score_args *args);

/* ---- Select (section 5) ------------------------------------------------------------------------- */

/*
 * The topk best of each row's `current` historical regions, and the current one, ascending, left-padded with
 * -1. Exact and stable: equal scores go to the smaller region, NaN ranks last. If regions <= topk, no score
 * is read and scores.data may be NULL. A current past the last region is taken as the last one (checking
 * mode: an error); -1 gives a row of -1.
 */
typedef struct csa_select_args {
    size_t size;
    csa_tensor scores;   /* fp32 [R, regions] */
    csa_tensor current;  /* int64 [R] */
    csa_tensor selected; /* int64 [R, min(topk, regions) + 1], out */
    int32_t topk;        /* 1 to 1024; 0: 512 */
    void *stream;
} csa_select_args;

CSA_API csa_status csa_select(const csa_context *context, const csa_select_args *args);

/* ---- Attend (section 6) ------------------------------------------------------------------------- */

/*
 * Attention of each row to the tokens of its selected regions, as far as the row sees them. Needs the cache's
 * kv. rows gives positions and active; NULL: they follow from tokens. Only the last min(position / 8 + 1,
 * width + 1) entries of a list are used, in any order; an entry that is negative, past the position, or whose
 * block is not in the table or the cache contributes no token (checking mode: an error); one that stands twice
 * counts twice. A row without a token, and an inactive row, is exactly 0, its log-sum-exp -inf.
 * cuda: rows are cut into parts while they are few (on an H200 up to 176, of an e4m3 cache 384), the shorter
 * the fewer there are. A part takes 12,416 bytes of the workspace; without room for them rows are cut less or
 * not at all, with the same bits, but few rows take several times as long. With W = width + 1 and r = min(R,
 * 384), max(min(r * ceil(W / 8), 640), r * ceil(W / 64)) parts are always enough: 7.9 MB for 40 rows at topk
 * 512, 43 MB for 384 or more.
 */
typedef struct csa_attend_args {
    size_t size;
    const csa_tokens *tokens;
    const csa_cache *cache;
    const csa_rows *rows; /* positions and active are read, both needed; may be NULL */
    csa_tensor query;     /* bf16 [T, G, H, 192], 1 to 16 heads, unit stride */
    csa_tensor selected;  /* int64 [R, width + 1], at most 1025 columns */
    csa_tensor gate;      /* bf16 [T, G, H]: out is multiplied by sigmoid(gate); absent: no gate */
    csa_tensor out;       /* bf16 [T, G, H, 192], out; may be the same view as query */
    csa_tensor lse; /* fp32 [T, G, H], out, optional: natural log of the sum of exp(scale * k_scale * q.k) */
    float scale;    /* of q.k; Step-5: 192^-0.5. 0 means 0: the plain mean of the values */
    void *stream;
    csa_workspace workspace; /* any number of bytes, at an address that is a multiple of 256; 0: none. Needs no
                                csa_warm_up; unused on host back ends */
} csa_attend_args;

CSA_API csa_status csa_attend(const csa_context *context, const csa_attend_args *args);

/* ---- Gate alone (section 6) --------------------------------------------------------------------- */

typedef struct csa_gate_args {
    size_t size;
    csa_tensor attention; /* bf16 [T, heads, 192], heads of all groups */
    csa_tensor gate;      /* bf16 [T, heads] */
    csa_tensor active;    /* bool [T]; absent: all. An inactive token gives exact zeros */
    csa_tensor out;       /* bf16 [T, heads, 192], out; may be the same view as attention */
    void *stream;
} csa_gate_args;

CSA_API csa_status csa_gate(const csa_context *context, const csa_gate_args *args);

/* ---- Whole steps: score + select + attend + gate ------------------------------------------------ */

/* The same bits as csa_score, csa_select and csa_attend one after the other (prefill: under an invariant plan).
 * Tokens are handled in chunks, so that the workspace stays within the context's scratch_limit, if the scratch
 * of one token does. */
typedef struct csa_step_args {
    size_t size;
    const csa_tokens *tokens;
    const csa_cache *cache;   /* kv and summaries */
    csa_tensor index_query;   /* as csa_score_args.query */
    csa_tensor index_weights; /* as csa_score_args.weights */
    csa_tensor query;         /* as in csa_attend_args, like gate, out (which may be query), lse and scale */
    csa_tensor gate;
    csa_tensor out;
    csa_tensor lse;
    const csa_rows *rows_out; /* may be NULL */
    csa_tensor selected;      /* out, optional: as csa_select_args.selected */
    int64_t regions; /* most regions a row may see; 0: columns * block_size / 8, what the table holds */
    int32_t topk;    /* 1 to 1024; 0: 512 */
    float scale;
    csa_workspace workspace; /* csa_workspace_size says how much */
    void *stream;
} csa_step_args;

/* Decode and verify: any tokens; nothing is planned on the host. */
CSA_API csa_status csa_decode(const csa_context *context, const csa_step_args *args);

/* Prefill, under a plan made for these T tokens. regions and topk are the plan's: leave them 0 or equal. */
CSA_API csa_status csa_prefill(const csa_context *context, const csa_plan *plan, const csa_step_args *args);

/*
 * What the host knows of a prefill step. positions may be upper bounds of the true ones, which the step reads
 * on the device to shorten its work. A row whose true position lies past the largest bound of the rows it is
 * handled with ranks only planned regions, unspecified which (checking mode: an error).
 */
typedef struct csa_plan_args {
    size_t size;
    const int64_t *positions; /* host [tokens]; negative: padding; NULL: bounded by regions alone */
    int64_t tokens;
    int64_t requests; /* for csa_layer: the tokens belong to requests [0, requests), decode requests follow */
    int64_t regions;  /* most any row of the step may see, csa_layer's decode rows included; at least 1 */
    int32_t groups;   /* KV groups, 1 to 8; 0: 1 */
    int32_t topk;     /* 0: 512 */
    bool invariant; /* the same bits as decode; false: as fast as possible within section 4's and 6's bounds */
} csa_plan_args;

/* Makes a plan (*plan is NULL before), or plans anew in an existing one's memory. A plan is host memory alone;
 * steps of its context take what they need from it before they return, so it may be planned anew or destroyed
 * at once, and several threads may run steps under one plan. Any number of plans may live. Allocates only to
 * create or to grow. On failure an existing plan stays as it was. */
CSA_API csa_status csa_plan_prefill(const csa_context *context, const csa_plan_args *args, csa_plan **plan);

/* NULL is allowed. */
CSA_API void csa_plan_destroy(csa_plan *plan);

/*
 * One whole layer step, from projections to gated output: csa_prepare, csa_summarize_*, then score, select,
 * attend and gate. The first tokens are prefill, as many as the plan has (none if plan is NULL), of requests
 * [0, plan's requests); decode tokens follow, query_len for each further request (1: the decode form of
 * section 3, more: verify). With a plan: positions, and query_start of all requests. A row may rank regions
 * closed in the same call. Batches in another order: call the parts one after the other on views.
 */
typedef struct csa_layer_args {
    size_t size;
    const csa_prepare_args *prepare; /* complete, with tokens, cache, attention part and all index outputs */
    csa_tensor z;                    /* bf16 [T, 256] */
    csa_tensor metadata;             /* int64 [plan's tokens, 10], optional: as in csa_summarize_prefill */
    csa_tensor gate;                 /* from here on as in csa_step_args; the stream is prepare's */
    csa_tensor out;                  /* may be the same view as prepare's query_out */
    csa_tensor lse;
    const csa_rows *rows_out;
    csa_tensor selected;
    int64_t regions;
    int32_t topk;
    float scale;
    csa_workspace workspace;
} csa_layer_args;

CSA_API csa_status csa_layer(const csa_context *context, const csa_plan *plan, const csa_layer_args *args);

/* ---- Asking before running ---------------------------------------------------------------------- */

typedef enum csa_op {
    CSA_OP_PREPARE = 1,            /* csa_prepare_args */
    CSA_OP_SUMMARIZE_DECODE = 2,   /* csa_summarize_args */
    CSA_OP_SUMMARIZE_VERIFY = 3,   /* csa_summarize_args */
    CSA_OP_SUMMARIZE_PREFILL = 4,  /* csa_summarize_args */
    CSA_OP_SUMMARIZE_METADATA = 5, /* csa_summarize_args */
    CSA_OP_SCORE = 6,              /* csa_score_args */
    CSA_OP_SELECT = 7,             /* csa_select_args */
    CSA_OP_ATTEND = 8,             /* csa_attend_args */
    CSA_OP_GATE = 9,               /* csa_gate_args */
    CSA_OP_DECODE = 10,            /* csa_step_args */
    CSA_OP_PREFILL = 11,           /* csa_step_args */
    CSA_OP_LAYER = 12              /* csa_layer_args */
} csa_op;

/* Would this call be accepted? The same checks and texts as the call itself (not the id checks of checking
 * mode, and without a plan), but nothing runs. Data pointers are not followed: shapes with made-up aligned
 * pointers will do. */
CSA_API csa_status csa_supported(const csa_context *context, csa_op op, const void *args);

/* The largest step an engine will ask for, and its model's sizes. */
typedef struct csa_serving {
    size_t size;
    int64_t regions;        /* most regions of a step: csa_step_args.regions, or what its 0 stands for */
    int64_t decode_tokens;  /* most decode tokens of a step: requests * query_len; 0: none */
    int64_t prefill_tokens; /* most prefill tokens of a step; 0: none */
    int32_t groups;         /* KV groups, 1 to 8; 0: 1 */
    int32_t heads;          /* query heads per group, 1 to 16; 0: 16 */
    int32_t index_heads;    /* index heads per group that steps are given, 1 to 8 or 16; 0: 8, as csa_prepare
                             * writes them */
    int32_t block_size;     /* 16, 32, 64 or 128; 0: 64 */
    int32_t topk;           /* 1 to 1024; 0: 512 */
    csa_dtype kv_dtype;     /* CSA_BF16 or CSA_E4M3; 0: CSA_BF16 */
} csa_serving;

/*
 * Exact bytes of workspace for csa_decode, csa_prefill and csa_layer up to this size, with a context of these
 * options (NULL: defaults, a host back end; cuda needs more). No device is touched. A step of exactly this size
 * is refused with one byte less; smaller steps with the same topk need no more. It holds a chunk's scores,
 * lists and positions and, on cuda, the parts that attention cuts rows into.
 */
CSA_API csa_status csa_workspace_size(const csa_context_options *options, const csa_serving *serving,
                                      size_t *bytes);

/* Starts threads, loads what is loaded lazily, touches and prepares the workspace, so that the steps after it
 * allocate and load nothing. Once per workspace. Optional on host back ends; on cuda required before the
 * workspace's first use (but for csa_attend's) and before a capture, and it waits for the device. */
CSA_API csa_status csa_warm_up(const csa_context *context, const csa_serving *serving, csa_workspace workspace);

#ifdef __cplusplus
}
#endif

#endif
