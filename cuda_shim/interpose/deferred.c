/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/deferred.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "account/account.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/latch.h"
#include "interpose/relax.h"

struct deferred {
	struct aq_entry held;    /* its context is the memory's; the stream that freed it may be another's */
	CUevent passed;
	CUcontext context;       /* of the event */
	struct aq_place place;   /* of the event */
	unsigned endings;        /* calls under way that may end the event's context: hands off */
	struct deferred *next;
};

/* A latch: events are queried and destroyed under it, because their context must not end meanwhile. Code inside a latch neither queries
 * nor marks items: items in a context that ends there are found gone at the next look. */
static struct aq_latch gate = AQ_LATCH_INITIALIZER;
static struct deferred *pending;
static _Atomic unsigned pending_count; /* without items to settle a caller does not need the gate */

static CUresult record(CUevent event, CUstream stream, bool per_thread)
{
	return per_thread ? aq_cuda.cuEventRecord_ptsz(event, stream) : aq_cuda.cuEventRecord(event, stream);
}

/* An event lives in the context that is current when it is made, and is recorded in streams of that one only. */
static bool mark_stream(struct deferred *item, CUstream stream, bool per_thread)
{
	bool pushed;

	item->context = aq_context_of_stream(stream);
	if (!item->context || !aq_place_of_stream(stream, &item->place) || !aq_context_enter(item->context, &pushed))
		return false;
	bool made = aq_cuda.cuEventCreate(&item->passed, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
	aq_context_leave(pushed);
	if (made && record(item->passed, stream, per_thread) == CUDA_SUCCESS)
		return true;
	if (made)
		aq_cuda.cuEventDestroy_v2(item->passed);
	return false;
}

bool aq_deferred_add(const struct aq_entry *held, CUstream stream, bool per_thread)
{
	struct deferred *item = aq_latch_is_inside() ? NULL : calloc(1, sizeof(*item));

	if (!item || !mark_stream(item, stream, per_thread)) {
		free(item);
		return false;
	}
	item->held = *held;
	aq_latch_enter(&gate);
	item->next = pending;
	pending = item;
	atomic_fetch_add_explicit(&pending_count, 1, memory_order_relaxed);
	aq_latch_leave(&gate);
	return true;
}

/* Take the items for which `due` is true out of the list, and uncharge them. `due` clears the event when it must not be touched any
 * more. */
static void settle_if(bool (*due)(struct deferred *, const void *), const void *context)
{
	struct deferred *done = NULL;

	if (!atomic_load_explicit(&pending_count, memory_order_relaxed) || aq_latch_is_inside())
		return;
	CUstreamCaptureMode mode = aq_relax();
	aq_latch_enter(&gate);
	for (struct deferred **link = &pending; *link;) {
		struct deferred *item = *link;

		if (!due(item, context)) {
			link = &item->next;
			continue;
		}
		*link = item->next;
		atomic_fetch_sub_explicit(&pending_count, 1, memory_order_relaxed);
		if (item->passed) /* with the gate held: its context may be about to end */
			aq_cuda.cuEventDestroy_v2(item->passed);
		item->next = done;
		done = item;
	}
	aq_latch_leave(&gate);
	aq_restrict(mode);
	while (done) {
		struct deferred *item = done;

		done = item->next;
		aq_uncharge((int)item->held.device, (enum aq_kind)item->held.kind, item->held.bytes);
		free(item);
	}
}

static bool has_passed(struct deferred *item, const void *context)
{
	(void)context;
	enum aq_event_look look = item->endings ? AQ_EVENT_AHEAD : aq_event_look(item->passed);

	/* An error about the event alone does not say that the stream has passed: its context must be gone too. */
	if (look == AQ_EVENT_GONE && aq_context_is_alive(item->context))
		return false;
	if (look == AQ_EVENT_GONE)
		item->passed = NULL;
	return look != AQ_EVENT_AHEAD;
}

void aq_deferred_settle(void)
{
	settle_if(has_passed, NULL);
}

/* ---- contexts that end ----------------------------------------------------------------------------------------- */

struct owner {
	int device;
	uint64_t owner;
};

/* An event in the context that is ending goes with it. */
static bool belongs_to(struct deferred *item, const void *context)
{
	const struct owner *owner = context;
	bool is_due = (int)item->held.device == owner->device && item->held.owner == owner->owner;

	if (is_due && item->endings)
		item->passed = NULL;
	return is_due;
}

void aq_deferred_context_gone(int device, uint64_t owner)
{
	settle_if(belongs_to, &(struct owner){ device, owner });
}

static bool is_in(const struct deferred *item, const struct aq_ending *ending)
{
	return aq_ending_has(ending, item->place.device, item->place.owner, item->context);
}

/* The driver ends a context when all of its work is done: its streams have passed. */
static bool ended_with(struct deferred *item, const void *context)
{
	if (!is_in(item, context))
		return false;
	item->passed = NULL;
	return true;
}

static void change_endings(const struct aq_ending *ending, bool begins)
{
	if (!atomic_load_explicit(&pending_count, memory_order_relaxed) || aq_latch_is_inside())
		return;
	aq_latch_enter(&gate);
	for (struct deferred *item = pending; item; item = item->next) {
		if (!is_in(item, ending))
			continue;
		if (begins)
			item->endings++;
		else if (item->endings) /* one that was added since has no mark */
			item->endings--;
	}
	aq_latch_leave(&gate);
}

void aq_deferred_context_ending(const struct aq_ending *ending)
{
	change_endings(ending, true);
}

void aq_deferred_context_ended(const struct aq_ending *ending, bool has_ended)
{
	if (has_ended)
		settle_if(ended_with, ending);
	else
		change_endings(ending, false);
}

void aq_deferred_forget(void)
{
	aq_latch_init(&gate);
	pending = NULL;
	atomic_store(&pending_count, 0);
}
