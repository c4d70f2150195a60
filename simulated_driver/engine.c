/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - the work of this process on one device: queues, and simulated GPU time.
 *
 * Model. A stream is a queue; its items end in order. Kernels of one process run one after the other, in order of submission among those
 * that may start; processes that have kernels to run share the SMs equally (time slices on the real card, so a small kernel takes as much
 * of it as a large one). Copies, events and host functions wait only for their own stream. The legacy stream orders itself against all
 * blocking streams.
 *
 * Time is a fluid, not a sleep per kernel: sim_engine `advance` brings the queues to `now`, giving out the interval since the last call at
 * the rate 1/sharers. Calls that need the result call it (a full queue, a query, a synchronisation); otherwise the engine's thread calls
 * it, so that events, busy time and host functions do not depend on the application's calls. A late caller therefore loses no simulated
 * time, except after a stop longer than SIM_STALL_NS, when the others have been given this process's share. The others lose no time
 * either: each process publishes since when it has kernels and how much SM time they need, so the others know when they ended before it has
 * looked itself.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "simulated_driver/cuda_internal.h"

#define QUANTUM_NS 2000000u         /* the thread's step while no thread waits */
#define WAITED_QUANTUM_NS 500000u   /* while a thread does: the number of sharers may change */
#define FOREIGN_QUANTUM_NS 100000u  /* while a stream waits for another device's event */
#define CATCH_UP_NS 100000u         /* a submission brings queues that were not looked at for this long to the present first */
#define SPIN_NS 60000u              /* a sleep ends this much too late; yield instead for waits shorter than that */

/* ---- small helpers --------------------------------------------------------------------------------------------------- */

static uint64_t max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}
static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static struct sim_slot_gpu *own_slot(const struct sim_engine *engine)
{
	int slot = atomic_load_explicit(&sim_cuda.slot, memory_order_relaxed);
	return slot >= 0 ? &sim_cuda.state->slots[slot].gpus[engine->device->gpu] : NULL;
}

static struct sim_work *head_of(const struct CUstream_st *stream)
{
	return &stream->ring[stream->head];
}

/* What the stream does next: its head, or the item of a graph that its head has come to. */
static const struct sim_work *current_item(const struct CUstream_st *stream)
{
	const struct sim_work *head = head_of(stream);
	return head->kind == SIM_WORK_GRAPH && stream->cursor < head->program->n_items ? &head->program->items[stream->cursor] : head;
}

static bool is_kernel(const struct sim_work *work)
{
	return work->kind == SIM_WORK_KERNEL;
}
static bool has_kernels(const struct sim_work *work)
{
	return is_kernel(work) || (work->kind == SIM_WORK_GRAPH && work->program->n_kernels);
}
static uint64_t kernels_ns(const struct sim_work *work)
{
	return work->kind == SIM_WORK_GRAPH ? work->program->kernels_ns : is_kernel(work) ? work->duration_ns : 0;
}
static bool is_host(const struct sim_work *work)
{
	return work->kind == SIM_WORK_HOST || work->kind == SIM_WORK_CALLBACK;
}
/* Looks at memory, which therefore must stay. */
static bool is_copy(const struct sim_work *work)
{
	return work->kind == SIM_WORK_COPY || work->kind == SIM_WORK_COPY_3D || work->kind == SIM_WORK_FILL || work->kind == SIM_WORK_VALUE;
}

static bool has_host_items(const struct sim_work *work)
{
	if (work->kind != SIM_WORK_GRAPH)
		return is_host(work);
	for (uint32_t i = 0; i < work->program->n_items; i++)
		if (is_host(&work->program->items[i]))
			return true;
	return false;
}

static bool has_copies(const struct sim_work *work)
{
	if (work->kind != SIM_WORK_GRAPH)
		return is_copy(work);
	for (uint32_t i = 0; i < work->program->n_items; i++)
		if (is_copy(&work->program->items[i]))
			return true;
	return false;
}

void sim_program_release(struct sim_program *program)
{
	if (atomic_fetch_sub(&program->references, 1) != 1)
		return;
	for (uint32_t i = 0; i < program->n_items; i++) {
		if (program->items[i].kind == SIM_WORK_COPY_3D)
			free(program->items[i].copy_3d);
		if (program->items[i].kind == SIM_WORK_EVENT || program->items[i].kind == SIM_WORK_WAIT)
			sim_event_release(program->items[i].event.event);
	}
	sim_user_holds_release(&program->user_holds);
	free(program->touches);
	free(program);
}

void sim_event_release(CUevent event)
{
	if (atomic_fetch_sub(&event->references, 1) != 1)
		return;
	if (event->share)
		sim_event_share_release(event);
	sim_object_delete(event);
}

/* What a queue item owns, when it leaves the queue without or after having been done. */
static void drop_item(const struct sim_work *work)
{
	switch (work->kind) {
	case SIM_WORK_COPY_3D: free(work->copy_3d); break;
	case SIM_WORK_EVENT:
	case SIM_WORK_WAIT: sim_event_release(work->event.event); break;
	case SIM_WORK_GRAPH: sim_program_release(work->program); break;
	default: break;
	}
}

/* ---- doing ----------------------------------------------------------------------------------------------------------- */

static void do_copy_3d(const struct sim_copy_3d *copy)
{
	for (uint64_t plane = 0; plane < copy->depth; plane++)
		for (uint64_t row = 0; row < copy->height; row++)
			memmove(copy->to + plane * copy->to_plane + row * copy->to_pitch,
				copy->from + plane * copy->from_plane + row * copy->from_pitch, copy->width);
}

static void do_fill(const struct sim_fill *fill)
{
	for (uint64_t row = 0; row < fill->height; row++) {
		uint8_t *at = fill->bytes + row * fill->pitch;
		if (fill->element_bytes == 1)
			memset(at, (int)fill->value, fill->width);
		else
			for (uint64_t i = 0; i < fill->width; i++)
				memcpy(at + i * fill->element_bytes, &fill->value, fill->element_bytes);
	}
}

/* The host, other devices and other processes use the same word: these pair with their atomic accesses. */
static void write_value(const struct sim_value *value)
{
	if (value->operation != SIM_VALUE_WRITE)
		return;
	if (value->bytes == 4)
		__atomic_store_n((uint32_t *)value->word, (uint32_t)value->value, __ATOMIC_RELEASE);
	else
		__atomic_store_n((uint64_t *)value->word, value->value, __ATOMIC_RELEASE);
}

static bool value_fits(const struct sim_value *value)
{
	bool narrow = value->bytes == 4;
	uint64_t found, wanted = narrow ? (uint32_t)value->value : value->value;
	found = narrow ? __atomic_load_n((const uint32_t *)value->word, __ATOMIC_ACQUIRE)
		       : __atomic_load_n((const uint64_t *)value->word, __ATOMIC_ACQUIRE);
	switch (value->operation) {
	case SIM_VALUE_WAIT_GEQ: return narrow ? (int32_t)(uint32_t)(found - wanted) >= 0 : (int64_t)(found - wanted) >= 0;
	case SIM_VALUE_WAIT_EQ: return found == wanted;
	case SIM_VALUE_WAIT_AND: return (found & wanted) != 0;
	case SIM_VALUE_WAIT_NOR: return (~(found | wanted) & (narrow ? UINT32_MAX : UINT64_MAX)) != 0;
	default: return true;
	}
}

static void finish_event(CUevent event, uint64_t ticket, uint64_t time_ns)
{
	uint64_t before = atomic_load_explicit(&event->times->finished, memory_order_relaxed);
	if (ticket <= before)
		return;
	atomic_store_explicit(&event->times->time_ns, time_ns, memory_order_relaxed);
	while (ticket > before) /* other processes may finish theirs; pairs with the acquire in event_finished */
		if (atomic_compare_exchange_weak_explicit(&event->times->finished, &before, ticket, memory_order_release,
							  memory_order_relaxed))
			return;
}

#define NEXT_TICKET (UINT64_C(1) << SIM_RECORDER_BITS)

static uint64_t ticket_after(CUevent event, uint64_t ticket)
{
	uint64_t me = event->share ? sim_recorder_of_slot(sim_cuda.state, atomic_load(&sim_cuda.slot)) : 0;
	return (ticket / NEXT_TICKET + 1) * NEXT_TICKET + me;
}

static uint64_t draw_ticket(CUevent event)
{
	uint64_t before = atomic_load(&event->times->recorded), ticket;
	do
		ticket = ticket_after(event, before);
	while (!atomic_compare_exchange_weak(&event->times->recorded, &before, ticket));
	return ticket;
}

/* A process that died will not finish its record any more. */
static bool recorder_died(CUevent event, uint64_t ticket)
{
	return event->share && ticket % NEXT_TICKET != ticket_after(event, 0) % NEXT_TICKET && !sim_recorder_lives(sim_cuda.state, ticket);
}

static bool event_finished(CUevent event, uint64_t ticket)
{
	if (ticket == 0)
		ticket = atomic_load_explicit(&event->times->recorded, memory_order_relaxed);
	if (atomic_load_explicit(&event->times->finished, memory_order_acquire) >= ticket)
		return true;
	if (!recorder_died(event, ticket))
		return false;
	finish_event(event, ticket, sim_now_ns());
	return true;
}

/* A record inside a graph has no ticket of its own: each launch drew one, and they complete in order. */
static uint64_t ticket_of(const struct sim_work *work)
{
	CUevent event = work->event.event;
	uint64_t recorded = sim_event_recorded(event), next = ticket_after(event, sim_event_finished(event));
	return work->event.ticket ? work->event.ticket : min_u64(recorded, next);
}

/* The effect of an item that has run its time. Host functions are not done here: they run without the lock. */
static void do_item(const struct sim_work *work, uint64_t end_ns)
{
	switch (work->kind) {
	case SIM_WORK_COPY: memmove(work->copy.to, work->copy.from, work->copy.bytes); break;
	case SIM_WORK_COPY_3D: do_copy_3d(work->copy_3d); break;
	case SIM_WORK_FILL: do_fill(&work->fill); break;
	case SIM_WORK_VALUE: write_value(&work->value); break;
	case SIM_WORK_EVENT: finish_event(work->event.event, ticket_of(work), end_ns); break;
	default: break;
	}
}

/* ---- the list of streams that have work ------------------------------------------------------------------------------ */

static void activate(struct sim_engine *engine, struct CUstream_st *stream)
{
	stream->next_active = NULL;
	stream->prev_active = engine->active_last;
	if (engine->active_last)
		engine->active_last->next_active = stream;
	else
		engine->active_first = stream;
	engine->active_last = stream;
}

static void deactivate(struct sim_engine *engine, struct CUstream_st *stream)
{
	if (stream->prev_active)
		stream->prev_active->next_active = stream->next_active;
	else
		engine->active_first = stream->next_active;
	if (stream->next_active)
		stream->next_active->prev_active = stream->prev_active;
	else
		engine->active_last = stream->prev_active;
}

static void stream_object_done(struct CUstream_st *stream)
{
	free(stream->ring);
	free(stream->tail);
	sim_object_delete(stream);
}

/* ---- retiring -------------------------------------------------------------------------------------------------------- */

static void count_out(struct sim_engine *engine, const struct sim_work *work)
{
	engine->pending--;
	if (has_kernels(work) && --engine->pending_kernels == 0)
		engine->kernels_left_ns = 0;
	if (has_host_items(work))
		engine->pending_host--;
	if (work->foreign)
		engine->pending_foreign--;
	if (work->kind == SIM_WORK_GRAPH)
		atomic_fetch_sub_explicit(&engine->pending_graphs, 1, memory_order_release);
	if (has_copies(work))
		atomic_fetch_sub_explicit(&engine->pending_copies, 1, memory_order_release);
}

static void pop(struct sim_engine *engine, struct CUstream_st *stream)
{
	struct sim_work work = *head_of(stream);
	stream->head = (stream->head + 1) & (stream->capacity - 1);
	stream->count--;
	stream->cursor = 0;
	stream->retired_sequence = work.sequence;
	count_out(engine, &work);
	drop_item(&work);
	if (stream->count == 0) {
		deactivate(engine, stream);
		if (stream->doomed)
			stream_object_done(stream);
	}
}

static bool orders_with_legacy(const struct CUstream_st *stream)
{
	return !stream->is_legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* The current item ended at `end_ns`. */
static void retire(struct sim_engine *engine, struct CUstream_st *stream, uint64_t end_ns)
{
	const struct sim_work *item = current_item(stream), *head = head_of(stream);
	do_item(item, end_ns);
	stream->ready_ns = end_ns;
	stream->begun = false;
	if (engine->running == stream)
		engine->running = NULL;
	if (orders_with_legacy(stream)) {
		CUcontext context = stream->context;
		atomic_store_explicit(&context->blocking_ready_ns,
				      max_u64(atomic_load_explicit(&context->blocking_ready_ns, memory_order_relaxed), end_ns),
				      memory_order_relaxed);
	}
	if (item != head && ++stream->cursor < head->program->n_items)
		return;
	pop(engine, stream);
}

/* ---- what may start, and when ---------------------------------------------------------------------------------------- */

/* The legacy stream and the blocking streams of a context take turns in order of submission. */
static bool ordered_behind_another(const struct sim_engine *engine, const struct CUstream_st *stream)
{
	uint64_t sequence = head_of(stream)->sequence;
	CUcontext context = stream->context;
	if (orders_with_legacy(stream))
		return context->legacy.count && head_of(&context->legacy)->sequence < sequence;
	if (!stream->is_legacy)
		return false;
	for (const struct CUstream_st *other = engine->active_first; other; other = other->next_active)
		if (other->context == context && orders_with_legacy(other) && head_of(other)->sequence < sequence)
			return true;
	return false;
}

static uint64_t earliest_start(const struct CUstream_st *stream)
{
	uint64_t start = max_u64(stream->ready_ns, head_of(stream)->submitted_ns);
	if (stream->is_legacy)
		return max_u64(start, atomic_load_explicit(&stream->context->blocking_ready_ns, memory_order_relaxed));
	return orders_with_legacy(stream) ? max_u64(start, stream->context->legacy.ready_ns) : start;
}

static bool may_run(const struct sim_engine *engine, const struct CUstream_st *stream)
{
	return !stream->host_running && !ordered_behind_another(engine, stream);
}

/* End of the current item if it is not a kernel and waits only for time; UINT64_MAX otherwise. */
static uint64_t other_item_end(const struct sim_engine *engine, const struct CUstream_st *stream, const struct sim_work *item)
{
	if (is_kernel(item) || is_host(item))
		return UINT64_MAX;
	if (item->kind == SIM_WORK_VALUE && item->value.operation != SIM_VALUE_WRITE)   /* when it came to fit is not known: now */
		return value_fits(&item->value) ? max_u64(earliest_start(stream), engine->last_step_ns) : UINT64_MAX;
	if (item->kind == SIM_WORK_WAIT) {
		if (!event_finished(item->event.event, item->event.ticket))
			return UINT64_MAX;
		return max_u64(earliest_start(stream), atomic_load_explicit(&item->event.event->times->time_ns, memory_order_relaxed));
	}
	return earliest_start(stream) + item->duration_ns;
}

/* ---- time ------------------------------------------------------------------------------------------------------------ */

/* Account [from, to) as busy at this process's share of the SMs. Only the engine writes its slot's buckets. */
static void account_busy(struct sim_engine *engine, uint64_t from, uint64_t to, uint32_t sharers)
{
	struct sim_slot_gpu *held = own_slot(engine);
	if (!held)
		return;
	while (from < to) {
		uint64_t number = from / SIM_BUCKET_NS, end = min_u64(to, (number + 1) * SIM_BUCKET_NS), busy = (end - from) / sharers;
		_Atomic uint64_t *bucket = &held->busy[number % SIM_BUSY_BUCKETS];
		uint64_t word = atomic_load_explicit(bucket, memory_order_relaxed);
		uint64_t so_far = word >> SIM_BUSY_BITS == number ? word & ((UINT64_C(1) << SIM_BUSY_BITS) - 1) : 0;
		atomic_store_explicit(bucket, number << SIM_BUSY_BITS | min_u64(so_far + busy, SIM_BUCKET_NS), memory_order_relaxed);
		atomic_store_explicit(&held->busy_total_ns, atomic_load_explicit(&held->busy_total_ns, memory_order_relaxed) + busy,
				      memory_order_relaxed);
		from = end;
	}
}

static struct CUstream_st *next_kernel_stream(const struct sim_engine *engine)
{
	struct CUstream_st *best = NULL;
	if (engine->running)
		return engine->running;
	for (struct CUstream_st *stream = engine->active_first; stream; stream = stream->next_active)
		if (is_kernel(current_item(stream)) && (!best || head_of(stream)->sequence < head_of(best)->sequence) &&
		    may_run(engine, stream))
			best = stream;
	return best;
}

/* Run kernels until the SMs' clock reaches `now` or a kernel ends that another item waits for. True when one ended. */
static bool step_kernels(struct sim_engine *engine, uint64_t now, uint32_t sharers)
{
	struct CUstream_st *stream = next_kernel_stream(engine);
	if (!stream)
		return false;
	if (!stream->begun) {
		uint64_t start = earliest_start(stream);
		if (start > now)
			return false;
		stream->begun = true;
		stream->remaining_ns = current_item(stream)->duration_ns;
		engine->running = stream;
		engine->kernel_clock_ns = max_u64(engine->kernel_clock_ns, start);
	}
	uint64_t from = engine->kernel_clock_ns, available = now > from ? now - from : 0;
	if (stream->remaining_ns <= available / sharers) {
		uint64_t end = from + stream->remaining_ns * sharers;
		account_busy(engine, from, end, sharers);
		engine->kernels_left_ns -= stream->remaining_ns;
		engine->kernel_clock_ns = end;
		retire(engine, stream, end);
		return true;
	}
	account_busy(engine, from, now, sharers);
	stream->remaining_ns -= available / sharers;
	engine->kernels_left_ns -= available / sharers;
	engine->kernel_clock_ns = max_u64(from, now);
	return false;
}

/* Retire every item that is not a kernel and has ended by `now`. */
static bool step_others(struct sim_engine *engine, uint64_t now)
{
	bool moved = false;
	for (struct CUstream_st *stream = engine->active_first, *next; stream; stream = next) {
		next = stream->next_active;
		const struct sim_work *item = current_item(stream);
		if (is_kernel(item) || !may_run(engine, stream))
			continue;
		uint64_t end = other_item_end(engine, stream, item);
		if (end > now)
			continue;
		retire(engine, stream, end);
		moved = true;
	}
	return moved;
}

/* Tell the other processes what this one needs of the SMs from `now` on; without kernels, when they ended. */
static void tell_others(struct sim_engine *engine, uint64_t now)
{
	struct sim_slot_gpu *held = own_slot(engine);
	if (!held)
		return;
	atomic_store_explicit(&held->kernels_told_ns, engine->pending_kernels ? now : engine->kernel_clock_ns, memory_order_relaxed);
	atomic_store_explicit(&held->kernels_left_ns, engine->kernels_left_ns, memory_order_relaxed);
}

static uint32_t sharers_at(const struct sim_engine *engine, uint64_t at, uint64_t *until)
{
	int slot = atomic_load_explicit(&sim_cuda.slot, memory_order_relaxed);
	return engine->pending_kernels && slot >= 0 ? sim_sm_sharers(sim_cuda.state, slot, engine->device->gpu, at, until) : 1;
}

/* Bring all queues to `until`, to where `sharers` processes use the SMs; true when anything was retired. */
static bool advance_shared(struct sim_engine *engine, uint64_t until, uint32_t sharers)
{
	bool moved, any = false;
	do {
		moved = step_others(engine, until);
		moved |= step_kernels(engine, until, sharers);
		any |= moved;
	} while (moved && engine->pending);
	return any;
}

/* Bring all queues to `now`; true when anything was retired. The lock is held. */
static bool advance(struct sim_engine *engine, uint64_t now)
{
	if (engine->pending == 0)
		return false;
	uint64_t at = engine->last_step_ns;
	if (now > at + SIM_STALL_NS) {
		at = now - SIM_STALL_NS;
		engine->kernel_clock_ns = max_u64(engine->kernel_clock_ns, at);
	}
	engine->last_step_ns = now;
	bool any = false;
	do {
		uint64_t until = now;
		uint32_t sharers = sharers_at(engine, at, &until);
		any |= advance_shared(engine, until, sharers);
		at = until;
	} while (at < now && engine->pending);
	tell_others(engine, now);
	if (any && engine->waiters)
		pthread_cond_broadcast(&engine->progress);
	return any;
}

/* When the next item will end, as far as known now. */
static uint64_t next_end(const struct sim_engine *engine, uint64_t now)
{
	uint64_t soonest = UINT64_MAX;
	const struct CUstream_st *kernel = next_kernel_stream(engine);
	if (kernel) {
		uint64_t left = kernel->begun ? kernel->remaining_ns : current_item(kernel)->duration_ns;
		uint64_t change = UINT64_MAX;
		soonest = max_u64(engine->kernel_clock_ns, earliest_start(kernel)) + left * sharers_at(engine, now, &change);
	}
	for (const struct CUstream_st *stream = engine->active_first; stream; stream = stream->next_active)
		if (may_run(engine, stream))
			soonest = min_u64(soonest, other_item_end(engine, stream, current_item(stream)));
	return soonest;
}

/* ---- waiting --------------------------------------------------------------------------------------------------------- */

static struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
}

static void cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
	struct timespec deadline = timespec_of(deadline_ns);
	pthread_cond_timedwait(cond, lock, &deadline);
}

/* One round of waiting: comes back when something was retired, and sometimes without. The lock is held before and after. */
static void wait_round(struct sim_engine *engine)
{
	uint64_t now = sim_now_ns();
	if (advance(engine, now))
		return;
	uint64_t soonest = next_end(engine, now);
	if (soonest > now && soonest - now < SPIN_NS) {
		pthread_mutex_unlock(&engine->lock);
		sched_yield();
		pthread_mutex_lock(&engine->lock);
		return;
	}
	if (soonest <= now)
		return;
	engine->waiters++;
	cond_wait_until(&engine->progress, &engine->lock, min_u64(soonest - min_u64(soonest - now, SPIN_NS), now + WAITED_QUANTUM_NS));
	engine->waiters--;
}

static bool stream_reached(const struct CUstream_st *stream, uint64_t sequence)
{
	return stream->count == 0 || head_of(stream)->sequence > sequence;
}

bool sim_engine_stream_done(CUstream stream)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	advance(engine, sim_now_ns());
	bool done = stream->count == 0;
	pthread_mutex_unlock(&engine->lock);
	return done;
}

void sim_engine_wait_stream(CUstream stream)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	uint64_t target = stream->last_sequence;
	if (stream->is_legacy)      /* waits for the blocking streams too: their items may be newer than its own last one */
		for (struct CUstream_st *other = engine->active_first; other; other = other->next_active)
			if (other->context == stream->context && orders_with_legacy(other))
				target = max_u64(target, other->last_sequence);
	for (;;) {
		bool reached = stream_reached(stream, target);
		if (stream->is_legacy)
			for (struct CUstream_st *other = engine->active_first; other && reached; other = other->next_active)
				if (other->context == stream->context && orders_with_legacy(other))
					reached = stream_reached(other, target);
		if (reached)
			break;
		wait_round(engine);
	}
	pthread_mutex_unlock(&engine->lock);
}

void sim_engine_wait_context(CUcontext context)
{
	struct sim_engine *engine = &context->device->engine;
	pthread_mutex_lock(&engine->lock);
	uint64_t target = engine->next_sequence;
	for (;;) {
		bool reached = true;
		for (struct CUstream_st *stream = engine->active_first; stream && reached; stream = stream->next_active)
			reached = stream->context != context || stream_reached(stream, target);
		if (reached)
			break;
		wait_round(engine);
	}
	pthread_mutex_unlock(&engine->lock);
}

/* Memory is about to be given back: no queued copy or fill may still want it. */
void sim_engine_wait_copies(struct sim_engine *engine)
{
	if (atomic_load_explicit(&engine->pending_copies, memory_order_acquire) == 0)
		return;
	pthread_mutex_lock(&engine->lock);
	while (atomic_load_explicit(&engine->pending_copies, memory_order_relaxed))
		wait_round(engine);
	pthread_mutex_unlock(&engine->lock);
}

/* Where this process recorded it; another one may have. */
static struct sim_engine *engine_of(CUevent event)
{
	struct sim_engine *engine = atomic_load(&event->engine);
	return engine ? engine : &event->context->device->engine;
}

bool sim_engine_event_done(CUevent event)
{
	uint64_t ticket = sim_event_recorded(event);
	if (ticket == 0 || event_finished(event, ticket))
		return true;
	struct sim_engine *engine = engine_of(event);
	pthread_mutex_lock(&engine->lock);
	advance(engine, sim_now_ns());
	pthread_mutex_unlock(&engine->lock);
	return event_finished(event, ticket);
}

void sim_engine_wait_event(CUevent event)
{
	uint64_t ticket = sim_event_recorded(event);
	if (ticket == 0 || event_finished(event, ticket))
		return;
	struct sim_engine *engine = engine_of(event);
	pthread_mutex_lock(&engine->lock);
	while (!event_finished(event, ticket))
		wait_round(engine);
	pthread_mutex_unlock(&engine->lock);
}

/* ---- submitting ------------------------------------------------------------------------------------------------------ */

static bool grow(struct CUstream_st *stream)
{
	uint32_t capacity = stream->capacity ? stream->capacity * 2 : 64;
	struct sim_work *ring = malloc(capacity * sizeof *ring);
	if (!ring)
		return false;
	for (uint32_t i = 0; i < stream->count; i++)
		ring[i] = stream->ring[(stream->head + i) & (stream->capacity - 1)];
	free(stream->ring);
	stream->ring = ring;
	stream->head = 0;
	stream->capacity = capacity;
	return true;
}

/* Room for one more item, which may mean waiting for the head to end. The lock is held, and released while waiting. */
static bool make_room(struct sim_engine *engine, struct CUstream_st *stream)
{
	while (sim_unlikely(stream->count == SIM_QUEUE_DEPTH))
		wait_round(engine);
	return sim_likely(stream->count < stream->capacity) || grow(stream);
}

static void count_in(struct sim_engine *engine, const struct sim_work *work)
{
	engine->pending++;
	if (has_kernels(work)) {
		engine->pending_kernels++;
		engine->kernels_left_ns += kernels_ns(work);
	}
	if (has_host_items(work))
		engine->pending_host++;
	if (work->foreign)
		engine->pending_foreign++;
	if (work->kind == SIM_WORK_GRAPH)
		atomic_fetch_add_explicit(&engine->pending_graphs, 1, memory_order_relaxed);
	if (has_copies(work))
		atomic_fetch_add_explicit(&engine->pending_copies, 1, memory_order_relaxed);
}

/* A launched graph's event records are due from now on. */
static void draw_tickets(struct sim_engine *engine, const struct sim_program *program)
{
	for (uint32_t i = 0; i < program->n_items; i++)
		if (program->items[i].kind == SIM_WORK_EVENT) {
			atomic_store(&program->items[i].event.event->engine, engine);
			draw_ticket(program->items[i].event.event);
		}
}

/* Kernels are about to be queued where there were no kernels. */
static void tell_beginning(const struct sim_engine *engine, uint64_t now)
{
	struct sim_slot_gpu *held = own_slot(engine);
	if (!held)
		return;
	atomic_store_explicit(&held->before_since_ns, atomic_load_explicit(&held->kernels_since_ns, memory_order_relaxed),
			      memory_order_relaxed);
	atomic_store_explicit(&held->before_end_ns, atomic_load_explicit(&held->kernels_told_ns, memory_order_relaxed),
			      memory_order_relaxed);
	atomic_store_explicit(&held->kernels_since_ns, now, memory_order_relaxed);
}

/* The item at the ring's end is written; make it part of the queue. */
static void publish(struct sim_engine *engine, struct CUstream_st *stream, struct sim_work *work)
{
	uint64_t now = sim_now_ns();
	if (engine->pending == 0)
		engine->last_step_ns = now;
	else if (now > engine->last_step_ns + CATCH_UP_NS)
		advance(engine, now);
	bool kernels = has_kernels(work);
	if (kernels && engine->pending_kernels == 0)
		tell_beginning(engine, now);
	work->sequence = ++engine->next_sequence;
	work->submitted_ns = now;
	stream->last_sequence = work->sequence;
	if (stream->count++ == 0)
		activate(engine, stream);
	count_in(engine, work);
	if (kernels)
		tell_others(engine, now);   /* as if the queue had been read now: at most CATCH_UP_NS too much */
	if (engine->thread_idle || has_host_items(work))
		pthread_cond_signal(&engine->work);
}

static struct sim_work *ring_end(struct CUstream_st *stream)
{
	return &stream->ring[(stream->head + stream->count) & (stream->capacity - 1)];
}

CUresult sim_engine_submit_kernel(CUstream stream, uint64_t duration_ns)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	bool room = make_room(engine, stream);
	if (sim_likely(room)) {
		struct sim_work *work = ring_end(stream);
		work->kind = SIM_WORK_KERNEL;
		work->foreign = false;
		work->duration_ns = duration_ns;
		publish(engine, stream, work);
	}
	pthread_mutex_unlock(&engine->lock);
	return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_engine_submit(CUstream stream, const struct sim_work *work)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	bool room = make_room(engine, stream);
	if (room) {
		struct sim_work *at = ring_end(stream);
		*at = *work;
		if (work->kind == SIM_WORK_GRAPH)
			draw_tickets(engine, work->program);
		publish(engine, stream, at);
	}
	pthread_mutex_unlock(&engine->lock);
	if (!room)
		drop_item(work);
	return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_engine_record(CUstream stream, CUevent event)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	bool room = make_room(engine, stream);
	if (room) {
		struct sim_work *work = ring_end(stream);
		/* The ticket is drawn and the engine named under the lock, so that the newest record of two threads is the one waited
		 * for. */
		atomic_store(&event->engine, engine);
		atomic_fetch_add(&event->references, 1);
		*work = (struct sim_work){ .kind = SIM_WORK_EVENT, .foreign = event->share, .event = { event, draw_ticket(event) } };
		publish(engine, stream, work);
	}
	pthread_mutex_unlock(&engine->lock);
	return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void sim_engine_retire_stream(CUstream stream)
{
	struct sim_engine *engine = stream->engine;
	pthread_mutex_lock(&engine->lock);
	if (stream->count)
		stream->doomed = true;
	else
		stream_object_done(stream);
	pthread_mutex_unlock(&engine->lock);
}

void sim_engine_empty_legacy(CUcontext context)
{
	struct CUstream_st *stream = &context->legacy;
	pthread_mutex_lock(&stream->engine->lock);
	free(stream->ring);
	stream->ring = NULL;
	stream->capacity = 0;
	pthread_mutex_unlock(&stream->engine->lock);
}

/* ---- the end of a GPU ------------------------------------------------------------------------------------------------ */

static void finish_without_effect(const struct sim_work *work, uint64_t now)
{
	if (work->kind == SIM_WORK_EVENT)
		finish_event(work->event.event, work->event.ticket, now);   /* its waiting threads wake up and get the context's error */
}

bool sim_engine_abort(struct sim_engine *engine)
{
	uint64_t now = sim_now_ns();
	pthread_mutex_lock(&engine->lock);
	bool had_work = engine->pending != 0;
	for (struct CUstream_st *stream = engine->active_first, *next; stream; stream = next) {
		next = stream->next_active;
		stream->begun = false;
		/* A running host function ends and takes its item out. */
		while (stream->count > (stream->host_running ? 1u : 0u)) {
			uint32_t last = (stream->head + stream->count - 1) & (stream->capacity - 1);
			struct sim_work work = stream->ring[last];
			finish_without_effect(&work, now);
			stream->count--;
			count_out(engine, &work);
			drop_item(&work);
		}
		if (stream->count == 0) {
			stream->cursor = 0;
			deactivate(engine, stream);
			if (stream->doomed)
				stream_object_done(stream);
		}
	}
	engine->running = NULL;
	tell_others(engine, now);
	pthread_cond_broadcast(&engine->progress);
	pthread_mutex_unlock(&engine->lock);
	return had_work;
}

/* ---- the engine's thread --------------------------------------------------------------------------------------------- */

static struct CUstream_st *stream_at_host_function(struct sim_engine *engine, uint64_t now)
{
	for (struct CUstream_st *stream = engine->active_first; stream; stream = stream->next_active)
		if (is_host(current_item(stream)) && may_run(engine, stream) && earliest_start(stream) <= now)
			return stream;
	return NULL;
}

/* Call the application's function without the lock, so that it may take its time; its stream waits, the others do not. */
static void run_host_function(struct sim_engine *engine, struct CUstream_st *stream)
{
	struct sim_work item = *current_item(stream);
	CUstream handle = stream->is_legacy ? NULL : stream;
	stream->host_running = true;
	pthread_mutex_unlock(&engine->lock);
	if (item.kind == SIM_WORK_HOST)
		item.host.run(item.host.data);
	else
		item.callback.run(handle, CUDA_SUCCESS, item.callback.data);
	pthread_mutex_lock(&engine->lock);
	stream->host_running = false;
	retire(engine, stream, sim_now_ns());
	pthread_cond_broadcast(&engine->progress);
}

/* Another device's event holds one of our streams: see to it that the other device's time goes on. */
static void poke_other_engines(const struct sim_engine *engine)
{
	for (int i = 0; i < sim_cuda.n_devices; i++) {
		struct sim_engine *other = &sim_cuda.devices[i].engine;
		if (other == engine || pthread_mutex_trylock(&other->lock) != 0)
			continue;
		advance(other, sim_now_ns());
		pthread_mutex_unlock(&other->lock);
	}
}

/* Waiting threads advance time themselves, so this thread has to be punctual only for its own work: host functions. */
static uint64_t wake_time(const struct sim_engine *engine, uint64_t now)
{
	if (engine->pending_foreign)
		return now + FOREIGN_QUANTUM_NS;
	if (!engine->pending_host)
		return now + QUANTUM_NS;
	return min_u64(max_u64(next_end(engine, now), now), now + WAITED_QUANTUM_NS);
}

static bool run_one_host_function(struct sim_engine *engine)
{
	if (!engine->pending_host)
		return false;
	uint64_t now = sim_now_ns();
	advance(engine, now);
	struct CUstream_st *stream = stream_at_host_function(engine, now);
	if (stream)
		run_host_function(engine, stream);
	return stream != NULL;
}

static void *engine_main(void *argument)
{
	struct sim_engine *engine = argument;
	char name[16] = "cuda-sim";
	prctl(PR_SET_NAME, name);
	prctl(PR_SET_TIMERSLACK, 1);
	pthread_mutex_lock(&engine->lock);
	for (;;) {
		if (engine->pending == 0) {
			engine->thread_idle = true;
			pthread_cond_wait(&engine->work, &engine->lock);
			engine->thread_idle = false;
			continue;
		}
		if (run_one_host_function(engine))
			continue;
		if (engine->pending_foreign) {
			pthread_mutex_unlock(&engine->lock);
			poke_other_engines(engine);
			pthread_mutex_lock(&engine->lock);
		}
		cond_wait_until(&engine->work, &engine->lock, wake_time(engine, sim_now_ns()));
		advance(engine, sim_now_ns());
	}
	return NULL;
}

static void cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
}

bool sim_mutex_init(pthread_mutex_t *mutex)
{
	pthread_mutexattr_t attr;
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);    /* held for nanoseconds: spin before going to sleep */
	bool made = pthread_mutex_init(mutex, &attr) == 0;
	pthread_mutexattr_destroy(&attr);
	return made;
}

bool sim_engine_init(struct sim_engine *engine, struct sim_device *device)
{
	engine->device = device;
	cond_init(&engine->progress);
	cond_init(&engine->work);
	return sim_mutex_init(&engine->lock);
}

bool sim_engine_start(struct sim_engine *engine)
{
	if (engine->has_thread)
		return true;
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);      /* signals are the application's, never delivered here */
	engine->has_thread = pthread_create(&thread, NULL, engine_main, engine) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (engine->has_thread)
		pthread_detach(thread);
	return engine->has_thread;
}
