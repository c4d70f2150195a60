#include "interpose/deferred.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "account/account.h"
#include "interpose/driver.h"
#include "interpose/relax.h"

struct deferred {
	struct aq_entry held;
	CUevent passed;
	struct deferred *next;
};

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static struct deferred *pending;
static _Atomic unsigned pending_count; /* lets who has nothing to settle pass without the gate */

static void credit(const struct aq_entry *held)
{
	aq_uncharge((int)held->device, (enum aq_kind)held->kind, held->bytes);
}

static CUresult record(CUevent event, CUstream stream, bool per_thread)
{
	return per_thread ? aq_cuda.cuEventRecord_ptsz(event, stream) : aq_cuda.cuEventRecord(event, stream);
}

void aq_deferred_add(const struct aq_entry *held, CUstream stream, bool per_thread)
{
	struct deferred *item = calloc(1, sizeof(*item));

	if (!item || aq_cuda.cuEventCreate(&item->passed, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
		free(item);
		credit(held); /* too early rather than never */
		return;
	}
	if (record(item->passed, stream, per_thread) != CUDA_SUCCESS) {
		aq_cuda.cuEventDestroy_v2(item->passed);
		free(item);
		credit(held);
		return;
	}
	item->held = *held;
	pthread_mutex_lock(&gate);
	item->next = pending;
	pending = item;
	atomic_fetch_add_explicit(&pending_count, 1, memory_order_relaxed);
	pthread_mutex_unlock(&gate);
}

/* Take the items out of the list for which `due` holds, and credit them. */
static void settle_if(bool (*due)(const struct deferred *, const void *), const void *context)
{
	struct deferred *done = NULL;

	if (!atomic_load_explicit(&pending_count, memory_order_relaxed))
		return;
	CUstreamCaptureMode mode = aq_relax();
	pthread_mutex_lock(&gate);
	for (struct deferred **link = &pending; *link;) {
		struct deferred *item = *link;

		if (!due(item, context)) {
			link = &item->next;
			continue;
		}
		*link = item->next;
		atomic_fetch_sub_explicit(&pending_count, 1, memory_order_relaxed);
		item->next = done;
		done = item;
	}
	pthread_mutex_unlock(&gate);
	aq_restrict(mode);
	while (done) {
		struct deferred *item = done;

		done = item->next;
		credit(&item->held);
		aq_cuda.cuEventDestroy_v2(item->passed);
		free(item);
	}
}

static bool has_passed(const struct deferred *item, const void *context)
{
	(void)context;
	return aq_event_look(item->passed) != AQ_EVENT_AHEAD;
}

void aq_deferred_settle(void)
{
	settle_if(has_passed, NULL);
}

struct owner {
	int device;
	uint64_t owner;
};

static bool belongs_to(const struct deferred *item, const void *context)
{
	const struct owner *owner = context;

	return (int)item->held.device == owner->device && item->held.owner == owner->owner;
}

void aq_deferred_drop(int device, uint64_t owner)
{
	settle_if(belongs_to, &(struct owner){ device, owner });
}

void aq_deferred_forget(void)
{
	pthread_mutex_init(&gate, NULL);
	pending = NULL;
	atomic_store(&pending_count, 0);
}
