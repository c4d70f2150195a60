/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/reservoir.h"

#include <stdlib.h>
#include <string.h>

#include "account/account.h"
#include "cancel.h"
#include "interpose/capture.h"
#include "interpose/driver.h"
#include "interpose/relax.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20)  /* of device memory */
#define PIECE_BYTES ((uint64_t)32 << 20) /* what a pool takes from the device at a time, until it is seen to take less */

#define REST_LOOKS 1000        /* at a stream that is to come to what was undone in it … */
#define REST_NAP_NS 1000000    /* … with this much sleep in between */

#define NO_POOL ((CUmemoryPool)(uintptr_t)-1) /* no handle of the driver; NULL means graph memory */

/* Entries are added and used again, never removed: readers walk the list without a lock. */
static _Atomic(struct aq_reservoir *) reservoirs;
static _Atomic unsigned overdrawn_count, freed_count;
/* Held during the search for an entry and while it is filled; waits for no gate meanwhile. */
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;

static void enter(struct aq_reservoir *r)
{
	aq_latch_enter(&r->gate);
}

static void leave(struct aq_reservoir *r)
{
	aq_latch_leave(&r->gate);
}

/* A flag of reservoirs, and how many have it. */
static void set(_Atomic bool *flag, _Atomic unsigned *count, bool value)
{
	if (atomic_exchange(flag, value) != value)
		atomic_fetch_add(count, value ? 1u : -1u);
}

static void set_overdrawn(struct aq_reservoir *r, bool overdrawn)
{
	set(&r->overdrawn, &overdrawn_count, overdrawn);
}

static void set_freed(struct aq_reservoir *r, bool freed)
{
	set(&r->freed, &freed_count, freed);
}

/* ---- finding --------------------------------------------------------------------------------------------------- */

static struct aq_reservoir *first(void)
{
	return atomic_load_explicit(&reservoirs, memory_order_acquire);
}

static struct aq_reservoir *find(CUmemoryPool pool, CUdevice ordinal)
{
	for (struct aq_reservoir *r = first(); r; r = r->next)
		if (atomic_load_explicit(&r->in_use, memory_order_acquire) && r->pool == pool && (pool || r->ordinal == ordinal))
			return r;
	return NULL;
}

bool aq_reservoir_is_ending(CUmemoryPool pool)
{
	const struct aq_reservoir *r = pool ? find(pool, 0) : NULL;

	return r && atomic_load_explicit(&r->ending, memory_order_relaxed);
}

/* An unused entry, entered. An entry with a held gate is skipped, without a wait: a thread may still settle the old pool. */
static struct aq_reservoir *enter_spare(void)
{
	for (struct aq_reservoir *r = first(); r; r = r->next)
		if (!atomic_load_explicit(&r->in_use, memory_order_acquire) && aq_latch_enter_at_once(&r->gate))
			return r;
	struct aq_reservoir *r = calloc(1, sizeof(*r));
	if (!r)
		return NULL;
	aq_latch_init(&r->gate);
	aq_latch_enter_at_once(&r->gate);
	r->next = first();
	atomic_store_explicit(&reservoirs, r, memory_order_release);
	return r;
}

static struct aq_reservoir *add(CUmemoryPool pool, CUdevice ordinal)
{
	pthread_mutex_lock(&adding);
	struct aq_reservoir *r = find(pool, ordinal);
	if (!r && (r = enter_spare())) {
		r->pool = pool;
		r->device = aq_device_of(ordinal);
		r->ordinal = ordinal;
		atomic_store(&r->ending, false);
		atomic_store(&r->may_be_gone, false);
		r->piece_bytes = pool ? PIECE_BYTES : PAGE_BYTES;
		memset(&r->graphs, 0, sizeof(r->graphs));
		atomic_store(&r->charged_bytes, 0);
		set_freed(r, false);
		atomic_store_explicit(&r->in_use, true, memory_order_release);
		leave(r);
	}
	pthread_mutex_unlock(&adding);
	return r;
}

struct aq_reservoir *aq_reservoir_add_pool(CUmemoryPool pool, CUdevice ordinal)
{
	return add(pool, ordinal);
}

struct aq_reservoir *aq_reservoir_of_graphs(CUdevice ordinal)
{
	struct aq_reservoir *r = find(NULL, ordinal);

	return r ? r : add(NULL, ordinal);
}

/* Pools are recorded when they are created or queried; the device's default pool may also be first seen in use. */
static bool has_no_pools(CUdevice ordinal)
{
	int supported = 1;

	return aq_cuda.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, ordinal) == CUDA_SUCCESS && !supported;
}

CUresult aq_reservoir_find_of_pool(CUmemoryPool pool, struct aq_reservoir **reservoir)
{
	int count = 0;

	*reservoir = find(pool, 0);
	CUresult result = *reservoir ? CUDA_SUCCESS : aq_cuda.cuDeviceGetCount(&count);
	for (int ordinal = 0; result == CUDA_SUCCESS && ordinal < count; ordinal++) {
		CUmemoryPool standard = NULL;

		result = aq_cuda.cuDeviceGetDefaultMemPool(&standard, ordinal);
		if (result == CUDA_ERROR_NOT_SUPPORTED && has_no_pools(ordinal)) {
			result = CUDA_SUCCESS;
		} else if (result == CUDA_SUCCESS && standard == pool) {
			*reservoir = add(pool, ordinal);
			return *reservoir ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	return result;
}

/* ---- querying the driver ---------------------------------------------------------------------------------------- */

static CUresult query(const struct aq_reservoir *r, CUmemPool_attribute of_pool, CUgraphMem_attribute of_graphs, uint64_t *bytes)
{
	cuuint64_t value = 0;
	CUresult result = r->pool ? aq_cuda.cuMemPoolGetAttribute(r->pool, of_pool, &value)
				  : aq_cuda.cuDeviceGetGraphMemAttribute(r->ordinal, of_graphs, &value);

	*bytes = value;
	return result;
}

static CUresult query_reserved(const struct aq_reservoir *r, uint64_t *bytes)
{
	return query(r, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, bytes);
}

/* Does this reply mean that the reservoir no longer exists, with all it held? The device was reset, and the shim saw its primary context
 * end. An error alone does not mean that, or a query that fails would uncharge what is held. */
static bool means_gone(struct aq_reservoir *r, CUresult reply)
{
	if (reply == CUDA_SUCCESS)
		atomic_store(&r->may_be_gone, false);
	return atomic_load(&r->may_be_gone) &&
	       (reply == CUDA_ERROR_INVALID_VALUE || reply == CUDA_ERROR_INVALID_HANDLE || reply == CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

/* What the reservoir holds that is unused at the moment. */
static uint64_t query_slack(const struct aq_reservoir *r)
{
	uint64_t reserved, used;

	if (query_reserved(r, &reserved) != CUDA_SUCCESS ||
	    query(r, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used) != CUDA_SUCCESS)
		return 0;
	return reserved > used ? reserved - used : 0;
}

/* ---- settling: with the gate held ------------------------------------------------------------------------------ */

/* The driver does not report what is reserved: the charge is what was reserved before, and `requested` where the call `took` it. */
static uint64_t presumed(uint64_t charged, uint64_t extra, uint64_t requested, bool took)
{
	if (!took)
		return charged - extra;
	return extra < requested ? charged - extra + requested : charged;
}

/* Set the charge to what the driver has reserved; `extra` is already charged for a call that `took` it or failed. False when it exceeds the
 * limit now. */
static bool settle_growth(struct aq_reservoir *r, uint64_t extra, uint64_t requested, bool took)
{
	uint64_t charged = atomic_load(&r->charged_bytes) + extra, reserved;
	bool fits = true;

	if (atomic_exchange(&r->unsettled, false))
		r->graphs.last = 0;
	CUresult reply = query_reserved(r, &reserved);
	if (means_gone(r, reply)) {
		reserved = 0;
	} else if (reply != CUDA_SUCCESS) {
		reserved = presumed(charged, extra, requested, took);
		atomic_store(&r->unsettled, true);
	}
	if (r->graphs.repeats && reserved < charged)
		reserved = charged;
	if (reserved < charged) {
		aq_uncharge(r->device, AQ_POOL, charged - reserved);
	} else if (reserved > charged) {
		fits = aq_charge_quick(r->device, AQ_POOL, reserved - charged);
		if (!fits)
			aq_charge_taken(r->device, AQ_POOL, reserved - charged);
	}
	atomic_store(&r->charged_bytes, reserved);
	return fits;
}

static bool settle(struct aq_reservoir *r)
{
	return settle_growth(r, 0, 0, false);
}

static void give_back_unused(const struct aq_reservoir *r)
{
	CUstreamCaptureMode mode = aq_relax();

	if (r->pool)
		aq_cuda.cuMemPoolTrimTo(r->pool, 0);
	if (!r->pool)
		aq_cuda.cuDeviceGraphMemTrim(r->ordinal);
	aq_restrict(mode);
}

/* Destroy an ending pool once it holds nothing. If the device was reset, and the pool with it, there is nothing to query. The entry drops
 * the handle first, because the driver may give it to the next pool at once. */
static CUresult end_if_empty(struct aq_reservoir *r)
{
	uint64_t reserved;
	CUresult reply = query_reserved(r, &reserved);
	bool there = reply == CUDA_SUCCESS;

	if (there ? reserved != 0 : !means_gone(r, reply))
		return CUDA_SUCCESS;
	set_overdrawn(r, false);
	CUmemoryPool pool = r->pool;
	r->pool = NO_POOL;
	CUresult result = there ? aq_cuda.cuMemPoolDestroy(pool) : CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		atomic_store_explicit(&r->in_use, false, memory_order_release);
	else
		r->pool = pool;
	return result;
}

static void look_at(struct aq_reservoir *r, bool trim)
{
	if (!atomic_load(&r->in_use)) /* the pool ended while this thread waited: there is nothing to query */
		return;
	if (trim || atomic_load(&r->overdrawn) || atomic_load(&r->ending))
		give_back_unused(r);
	settle(r);
	if (atomic_load(&r->overdrawn) && !(aq_account_over(r->device) && query_slack(r)))
		set_overdrawn(r, false);
	if (atomic_load(&r->ending))
		end_if_empty(r);
}

static void settle_one(struct aq_reservoir *r, bool trim)
{
	enter(r);
	look_at(r, trim);
	leave(r);
}

static void visit(int device, bool trim)
{
	if (aq_latch_is_inside())
		return;
	for (struct aq_reservoir *r = first(); r; r = r->next) {
		if (!atomic_load_explicit(&r->in_use, memory_order_acquire) || r->device != device)
			continue;
		/* otherwise there is nothing to give back, and growth settles itself */
		if (atomic_load(&r->charged_bytes) || atomic_load(&r->unsettled))
			settle_one(r, trim);
	}
}

void aq_reservoirs_return_overdrawn(void)
{
	if (!atomic_load_explicit(&overdrawn_count, memory_order_relaxed) || aq_latch_is_inside())
		return;
	for (struct aq_reservoir *r = first(); r; r = r->next)
		if (atomic_load(&r->overdrawn))
			settle_one(r, true);
}

void aq_reservoirs_context_gone(int device, uint64_t owner)
{
	for (struct aq_reservoir *r = first(); r && !owner; r = r->next)
		if (atomic_load_explicit(&r->in_use, memory_order_acquire) && r->device == device)
			atomic_store(&r->may_be_gone, true);
	aq_reservoirs_settle(device);
}

void aq_reservoirs_settle(int device)
{
	visit(device, false);
}

void aq_reservoirs_trim(int device)
{
	visit(device, true);
}

/* May more of it go back at a later synchronisation? Not what the program set the driver to keep. */
static bool may_shrink(const struct aq_reservoir *r)
{
	cuuint64_t kept = 0;

	if (!atomic_load(&r->in_use))
		return false;
	aq_cuda.cuMemPoolGetAttribute(r->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &kept);
	return atomic_load(&r->overdrawn) || atomic_load(&r->charged_bytes) > kept;
}

void aq_reservoirs_synchronized(void)
{
	if (!atomic_load_explicit(&freed_count, memory_order_relaxed) || aq_latch_is_inside())
		return;
	for (struct aq_reservoir *r = first(); r; r = r->next) {
		if (!atomic_load(&r->freed) || !aq_latch_enter_at_once(&r->gate))
			continue;
		set_freed(r, false); /* before the look: what is freed from here on is for the next look */
		look_at(r, false);
		if (may_shrink(r))
			set_freed(r, true);
		leave(r);
	}
}

/* ---- growing --------------------------------------------------------------------------------------------------- */

static uint64_t round_up(uint64_t bytes, uint64_t granule)
{
	return bytes > UINT64_MAX - granule ? UINT64_MAX : (bytes + granule - 1) / granule * granule;
}

/* How much the reservoir is expected to grow for `bytes`: whole pieces. */
static uint64_t expected_growth(const struct aq_reservoir *r, uint64_t bytes)
{
	return round_up(bytes, r->piece_bytes);
}

/* The least that it may take: a request larger than a piece is not known to take whole ones. */
static uint64_t least_growth(const struct aq_reservoir *r, uint64_t bytes)
{
	return bytes < r->piece_bytes ? expected_growth(r, bytes) : round_up(bytes, PAGE_BYTES);
}

static bool charge(struct aq_growth *growth, uint64_t bytes)
{
	growth->charged_bytes = bytes;
	return aq_charge_quick(growth->reservoir->device, AQ_POOL, bytes);
}

/* Charge enough for the coming call. Without room for that, the call may still fit into the reservoir's idle memory. The `last` time, when
 * nothing more can be reclaimed, the driver may take less than expected: what it took decides. */
static bool charge_growth(struct aq_growth *growth, uint64_t bytes, enum aq_growth_hope hope, bool last)
{
	struct aq_reservoir *r = growth->reservoir;

	if (charge(growth, expected_growth(r, bytes)))
		return true;
	if (hope == AQ_AT_ONCE)
		return false;
	settle(r);
	uint64_t slack = hope == AQ_FROM_IDLE ? query_slack(r) : 0, missing = slack < bytes ? bytes - slack : 0;
	return charge(growth, expected_growth(r, missing)) || (last && charge(growth, least_growth(r, missing)));
}

/* Pieces are learned from what is seen: of requests that one piece is enough for, so that a growth is the size of a piece and not of a
 * request. Only of pools: graph memory grows by what its graphs need. */
static void learn_piece(const struct aq_growth *growth, uint64_t grown)
{
	struct aq_reservoir *r = growth->reservoir;

	if (r->pool && growth->bytes <= PIECE_BYTES && (grown < r->piece_bytes || grown > growth->charged_bytes))
		r->piece_bytes = grown;
}

static void run_begins(struct aq_growth *growth)
{
	struct aq_reservoir *r = growth->reservoir;

	growth->alone = !r->graphs.runs++;
	growth->run = ++r->graphs.charged;
	r->graphs.last = 0;
}

/* What another took while this one was under way, or before, this one may have given up to it or waits to take back. */
static void run_ends(const struct aq_growth *growth)
{
	struct aq_reservoir *r = growth->reservoir;

	r->graphs.runs--;
	if (!growth->alone || growth->run != r->graphs.charged)
		return;
	r->graphs.last = growth->graph;
	r->graphs.last_bytes = atomic_load(&r->charged_bytes);
}

/* Has the driver yet to give back what did not fit? */
static bool still_overdrawn(struct aq_reservoir *r)
{
	if (!atomic_load(&r->overdrawn) || aq_latch_is_inside())
		return false;
	settle_one(r, true);
	return atomic_load(&r->overdrawn);
}

bool aq_growth_begin(struct aq_growth *growth, struct aq_reservoir *reservoir, uint64_t bytes, enum aq_growth_hope hope)
{
	if (reservoir->device < 0 || (!bytes && hope == AQ_AT_ONCE && still_overdrawn(reservoir)))
		return false;
	*growth = (struct aq_growth){ .reservoir = reservoir, .bytes = bytes, .is_nested = aq_latch_is_inside() };
	for (int attempt = 0; attempt < 2 && !growth->is_nested; attempt++) {
		enter(reservoir);
		if (charge_growth(growth, bytes, hope, attempt == 1)) {
			run_begins(growth);
			return true;
		}
		leave(reservoir);
		if (hope == AQ_AT_ONCE || !aq_reclaim(reservoir->device)) /* takes the gates of all reservoirs */
			break;
	}
	return growth->is_nested;
}

void aq_growth_open_gate(struct aq_growth *growth)
{
	if (!growth->is_nested)
		leave(growth->reservoir);
}

void aq_growth_close_gate(struct aq_growth *growth)
{
	if (!growth->is_nested)
		enter(growth->reservoir);
}

bool aq_growth_end(struct aq_growth *growth)
{
	struct aq_reservoir *r = growth->reservoir;

	if (growth->is_nested) { /* charged with the call around it where that is of the same reservoir, else with the next that settles */
		atomic_store(&r->unsettled, true);
		return true;
	}
	uint64_t before = atomic_load(&r->charged_bytes);
	bool is_only_one = !atomic_load(&r->unsettled); /* otherwise it may have grown for others too */
	uint64_t most = growth->most_bytes > growth->bytes ? growth->most_bytes : growth->bytes;
	bool fits = settle_growth(r, growth->charged_bytes, most, !growth->failed);
	if (!growth->bytes && !growth->failed && atomic_load(&r->unsettled))
		fits = false; /* it may have taken any amount, and nothing says how much */
	uint64_t after = atomic_load(&r->charged_bytes);

	if (growth->charged_bytes && is_only_one && !atomic_load(&r->unsettled) && after > before)
		learn_piece(growth, after - before);
	if (!fits)
		growth->graph = 0; /* it must be judged again */
	run_ends(growth);
	if (fits)
		leave(r);
	return fits;
}

bool aq_repeat_begin(struct aq_reservoir *r, uint64_t graph)
{
	uint64_t reserved;

	if (aq_latch_is_inside())
		return false;
	enter(r);
	bool is_last = r->graphs.last == graph && !atomic_load(&r->unsettled) && query_reserved(r, &reserved) == CUDA_SUCCESS &&
		       reserved >= r->graphs.last_bytes;
	r->graphs.runs += is_last;
	r->graphs.repeats += is_last;
	leave(r);
	return is_last;
}

void aq_repeat_end(struct aq_reservoir *r)
{
	enter(r);
	r->graphs.runs--;
	r->graphs.repeats--;
	settle(r);
	leave(r);
}

/* Has everything in the stream come to its end? */
static bool is_at_rest(CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = per_thread ? aq_cuda.cuStreamQuery_ptsz(stream) : aq_cuda.cuStreamQuery(stream);

	aq_restrict(mode);
	return result != CUDA_ERROR_NOT_READY;
}

/* The driver may notice a completed free only after a synchronisation; without pending work that takes no time. */
static void observe(CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode = aq_relax();

	if (per_thread)
		aq_cuda.cuStreamSynchronize_ptsz(stream);
	else
		aq_cuda.cuStreamSynchronize(stream);
	aq_restrict(mode);
}

void aq_growth_undone(struct aq_growth *growth, CUstream stream, bool per_thread)
{
	struct aq_reservoir *r = growth->reservoir;

	set_overdrawn(r, true);
	set_freed(r, true);
	leave(r);
	settle_one(r, true);
	for (unsigned i = 0; i < REST_LOOKS && atomic_load(&r->overdrawn) && !aq_is_captured(stream, per_thread); i++) {
		if (is_at_rest(stream, per_thread)) {
			observe(stream, per_thread);
			settle_one(r, true);
			return;
		}
		aq_sleep(REST_NAP_NS);
	}
}

/* ---- freeing --------------------------------------------------------------------------------------------------- */

CUresult aq_reservoir_destroy(struct aq_reservoir *r)
{
	cuuint64_t nothing = 0;
	CUmemoryPool pool = r->pool, current = NULL, standard = NULL;
	CUresult result = CUDA_SUCCESS;

	CUstreamCaptureMode mode = aq_relax();
	if (aq_cuda.cuDeviceGetMemPool(&current, r->ordinal) == CUDA_SUCCESS && current == pool &&
	    aq_cuda.cuDeviceGetDefaultMemPool(&standard, r->ordinal) == CUDA_SUCCESS)
		aq_cuda.cuDeviceSetMemPool(r->ordinal, standard);
	aq_cuda.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &nothing);
	aq_restrict(mode);
	atomic_store(&r->ending, true);
	if (aq_latch_is_inside()) { /* from a callback, which waits for no gate: the next thread that looks continues from here */
		atomic_store(&r->unsettled, true);
		return CUDA_SUCCESS;
	}
	enter(r);
	if (r->pool == pool && atomic_load(&r->ending)) { /* otherwise another thread that looked has ended it already */
		give_back_unused(r);
		settle(r);
		result = end_if_empty(r);
		if (result != CUDA_SUCCESS)
			atomic_store(&r->ending, false);
	}
	leave(r);
	return result;
}

void aq_reservoir_freed(struct aq_reservoir *r)
{
	set_freed(r, true);
}

void aq_reservoirs_forget(void)
{
	pthread_mutex_init(&adding, NULL);
	for (struct aq_reservoir *r = first(); r; r = r->next) {
		aq_latch_init(&r->gate);
		atomic_store(&r->in_use, false);
		atomic_store(&r->overdrawn, false);
		atomic_store(&r->freed, false);
		atomic_store(&r->unsettled, false);
	}
	atomic_store(&overdrawn_count, 0);
	atomic_store(&freed_count, 0);
}
