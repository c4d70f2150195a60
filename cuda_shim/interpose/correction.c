/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/correction.h"

#include "cancel.h"
#include "interpose/ceiling.h"
#include "interpose/own_use.h"
#include "interpose/pacer.h"
#include "limit/control.h"

/* The driver's last figure. */
static struct figure {
	_Atomic bool is_complete;   /* it was of all processes: what was paid ahead may be given back */
	_Atomic int64_t used_at_ns; /* when it last reported use by the container */
} figures[AQ_MAX_DEVICES];

static _Atomic bool busy; /* one thread at a time, of all devices; another has no need to wait for it */

static bool was_used(const struct aq_measured *measured)
{
	for (unsigned i = 0; i < measured->count; i++)
		if (measured->process[i].share_q16)
			return true;
	return false;
}

static void take_figure(int device, int64_t now_ns, uint32_t percent)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	uint64_t since = atomic_load_explicit(&pacer->settlement->seen_us, memory_order_relaxed);
	struct aq_measured measured;

	if (aq_own_use(&aq_limited->region, aq_limited->limits.device[device].uuid_text, device, now_ns, &since, &measured)) {
		atomic_store_explicit(&figures[device].is_complete, measured.is_complete, memory_order_relaxed);
		if (was_used(&measured))
			atomic_store_explicit(&figures[device].used_at_ns, now_ns, memory_order_relaxed);
		aq_control_settle(pacer->bucket, pacer->settlement, percent, &measured);
	} else {
		atomic_store_explicit(&pacer->settlement->seen_us, since, memory_order_relaxed);
	}
	aq_own_use_conclude(pacer->settlement, now_ns);
}

bool aq_correct(int device, int64_t now_ns, uint32_t percent, bool is_held)
{
	struct aq_pacer *pacer = &aq_pacers[device];

	if (!aq_control_take_lease(pacer->bucket, now_ns,
				   is_held || atomic_load_explicit(&pacer->settlement->owed_ns, memory_order_relaxed) > 0))
		return false;
	if (atomic_exchange_explicit(&busy, true, memory_order_acquire))
		return false;
	int cancel = aq_hold_cancel();
	take_figure(device, now_ns, percent);
	atomic_store_explicit(&busy, false, memory_order_release);
	aq_allow_cancel(cancel);
	return true;
}

void aq_correction_give_back(int device)
{
	if (atomic_load_explicit(&figures[device].is_complete, memory_order_relaxed))
		aq_control_give_back(aq_pacers[device].bucket, aq_pacers[device].settlement);
}

/* Wait until the driver has reported everything up to now. False if another process takes the figures in. */
static bool await_figures(int device, uint32_t percent)
{
	int64_t begin = aq_now_ns();

	for (int64_t now = begin; now < begin + AQ_CONCLUDE_NS; now = aq_now_ns()) {
		bool is_due = now - begin >= AQ_CONTROL_LATE_NS + AQ_CONTROL_PERIOD_NS / 2;

		if (aq_correct(device, now, percent, true) && is_due)
			return true;
		aq_nap(AQ_NAP_MOST_NS);
	}
	return false;
}

/* Do the driver's figures name this process, and all others of the container? */
static bool is_reported(int device, const struct aq_compared *compared, int64_t now_ns)
{
	return atomic_load_explicit(&figures[device].is_complete, memory_order_relaxed) &&
	       now_ns - atomic_load_explicit(&compared->closed_at_ns, memory_order_relaxed) < AQ_CONCLUDE_NS + 2 * AQ_CONTROL_LATE_NS;
}

void aq_correction_conclude(int device)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	struct aq_virtual_device *row = aq_region_virtual(&aq_limited->region, (uint32_t)aq_limited->region.slot_index, (uint32_t)device);
	uint32_t percent = aq_ceiling_now(device, aq_now_ns());
	int64_t worth = AQ_CONCLUDE_NS * percent / 100;
	int64_t paid = (int64_t)atomic_load_explicit(&pacer->mine->busy_ns, memory_order_relaxed);

	if (!row || !aq_ceiling_is_one(percent) || atomic_load_explicit(&pacer->bucket->balance_ns, memory_order_relaxed) > -worth ||
	    aq_control_uncovered(&row->compared, paid) < worth)
		return;
	if (!await_figures(device, percent) || !is_reported(device, &row->compared, aq_now_ns()))
		return;
	aq_control_conclude(pacer->settlement, &row->compared, paid);
	aq_control_give_all_back(pacer->bucket, pacer->settlement);
}

int64_t aq_correction_used_at_ns(int device)
{
	return atomic_load_explicit(&figures[device].used_at_ns, memory_order_relaxed);
}

void aq_correction_forget(void)
{
	atomic_store(&busy, false);
	aq_own_use_forget();
}
