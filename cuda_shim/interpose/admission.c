/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/admission.h"

#include "interpose/ceiling.h"
#include "interpose/context.h"
#include "interpose/correction.h"
#include "interpose/latch.h"
#include "interpose/pacer.h"
#include "interpose/sample.h"
#include "interpose/time_slot.h"
#include "interpose/wait.h"
#include "limit/control.h"

#define BATCH_NS 250000              /* a thread draws credit for this much device time at once, or for one launch if that is longer */
#define PATIENCE_ASKED_NS 300000000ll /* until the driver has a figure, which it also had if the device worked so lately */

/* The part of the device by which what this process has in flight is measured: what others of low priority have there counts as well, and a
 * low ceiling keeps less there. */
static uint32_t part_in_flight(int device)
{
	uint32_t percent = atomic_load_explicit(&aq_limited->limits.device[device].sm_percent, memory_order_relaxed);
	uint32_t part = aq_ceiling_is_low(device) ? aq_in_flight_part(&aq_pacers[device].flight) : AQ_PART_ONE;
	uint32_t most = aq_ceiling_is_one(percent) ? aq_in_flight_part_of_ceiling(percent) : AQ_PART_ONE;

	return part < most ? part : most;
}

int64_t aq_admission_batch(int device)
{
	int64_t step = aq_in_flight_step_ns(part_in_flight(device));

	return step < BATCH_NS ? step : BATCH_NS;
}

/* Wait until the device may be used for `batch_ns`, and take that out of the bucket if there is a ceiling. */
static void draw(int device, int64_t batch_ns)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	struct aq_wait wait = { device, 0 };

	for (;;) {
		aq_ceilings_look();
		aq_wait_while_paused(&wait);
		if (aq_time_slot_wait(&wait))
			continue;

		int64_t now = aq_now_ns();
		uint32_t percent = aq_ceiling_now(device, now);
		atomic_store_explicit(&pacer->is_metered, aq_ceiling_is_one(percent), memory_order_relaxed);
		if (!aq_ceiling_is_one(percent)) {
			aq_control_interrupted(pacer->bucket);
			aq_bucket_interrupted(pacer->bucket);
			break;
		}
		if (aq_ceiling_is_trickle(device, percent))
			aq_bucket_spill(pacer->bucket, BATCH_NS);
		bool has_paid = aq_bucket_pay(pacer->bucket, now, percent, batch_ns);
		aq_correct(device, now, percent, !has_paid);
		if (has_paid)
			break;
		aq_wait_begin(&wait, now);
		aq_samples_look(device);
		aq_correction_give_back(device);
		aq_nap(aq_bucket_wait_ns(pacer->bucket, percent));
	}
	aq_wait_end(&wait);
}

/* How long without progress to wait. Under a ceiling the driver is asked meanwhile: if it reports that the container uses the device, then
 * launches take longer than they did, and more of them would make it worse. Else the device may be waiting for a launch. */
static int64_t patience_ns(int device, uint32_t part, int64_t now)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	uint32_t percent = aq_ceiling_now(device, now);
	int64_t usual = aq_in_flight_patience_ns(&pacer->flight, part);

	if (!aq_ceiling_is_one(percent) || usual > PATIENCE_ASKED_NS)
		return usual;
	aq_correct(device, now, percent, true);
	if (now - aq_correction_used_at_ns(device) < PATIENCE_ASKED_NS)
		return AQ_SETTLE_RUNNING_NS;
	return atomic_load_explicit(&pacer->is_held_up, memory_order_relaxed) ? usual : PATIENCE_ASKED_NS;
}

/* Wait until this much more may be launched in addition to the unfinished work; if nothing finishes for long, stop waiting. */
static void wait_for_progress(int device, uint32_t part, int64_t cost_ns)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	int64_t finished = -1, since = 0;

	while (!aq_in_flight_has_room(&pacer->flight, part, cost_ns)) {
		int64_t now = aq_now_ns(), before = finished;

		finished = atomic_load_explicit(&pacer->flight.finished_ns, memory_order_relaxed);
		if (finished != before)
			since = now;
		if (now - since >= patience_ns(device, part, now)) {
			atomic_store_explicit(&pacer->is_held_up, true, memory_order_relaxed);
			aq_in_flight_give_up(&pacer->flight);
			return;
		}
		aq_nap(aq_in_flight_stretch(AQ_NAP_LEAST_NS, part));
		aq_samples_look(device);
		part = part_in_flight(device);
	}
}

void aq_admission_await_measurement(int device, uint32_t most)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	int64_t since = aq_now_ns();

	aq_samples_look(device);
	while (atomic_load_explicit(&pacer->unmeasured, memory_order_relaxed) >= most && !aq_latch_is_inside()) {
		bool runs = atomic_load_explicit(&pacer->runs, memory_order_relaxed);

		if (atomic_load_explicit(&pacer->is_held_up, memory_order_relaxed))
			return;
		if (aq_now_ns() - since > (runs ? AQ_SETTLE_RUNNING_NS : AQ_SETTLE_BEGIN_NS)) {
			atomic_store_explicit(&pacer->is_held_up, true, memory_order_relaxed);
			return;
		}
		aq_nap(AQ_NAP_LEAST_NS);
		aq_samples_look(device);
	}
}

bool aq_admit(int device, const struct aq_work *work, int64_t batch_ns)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	struct aq_place place;

	if (!aq_place_of_stream(work->stream, &place) || place.device != device)
		return false;
	aq_time_slot_learn_capacity(&place);
	aq_samples_look(device);
	uint32_t part = part_in_flight(device);
	int64_t step = aq_in_flight_step_ns(part);
	atomic_store_explicit(&pacer->mark_every_ns, step < BATCH_NS || !aq_ceiling_restrains(device) ? step : BATCH_NS,
			      memory_order_relaxed);
	wait_for_progress(device, part, batch_ns); /* before it draws: a thread that has drawn launches, whatever begins meanwhile */
	draw(device, batch_ns);
	aq_time_slot_prefetch(&place, work);
	atomic_fetch_add_explicit(&pacer->mine->busy_ns, (uint64_t)batch_ns, memory_order_relaxed);
	atomic_fetch_add_explicit(&pacer->flight.submitted_ns, batch_ns, memory_order_relaxed);
	return true;
}
