/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/pace.h"

#include <stdlib.h>

#include "interpose/admission.h"
#include "interpose/capture.h"
#include "interpose/ceiling.h"
#include "interpose/context.h"
#include "interpose/correction.h"
#include "interpose/neighbours.h"
#include "interpose/pacer.h"
#include "interpose/payer.h"
#include "interpose/sample.h"
#include "interpose/time_slot.h"
#include "interpose/unpaced.h"
#include "interpose/wait.h"
#include "limit/cost.h"
#include "limit/settle.h"
#include "shim.h"

static _Atomic bool settles_at_exit;
/* For high priority: what this process wrote to the page. */
static struct aq_priority_own announced[AQ_MAX_DEVICES];

/* The first statement of a paced launch before anything is decided. */
static CUresult decide(bool *limited)
{
	enum aq_mode mode = aq_mode();

	*limited = mode == AQ_LIMITED;
	if (mode == AQ_PASSING)
		aq_unpaced_always();
	return mode == AQ_REFUSING ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

static void count_free(int device)
{
	int64_t passed = aq_unpaced_take();

	if (device >= 0)
		atomic_fetch_add_explicit(&aq_pacers[device].mine->launches, (uint64_t)passed, memory_order_relaxed);
}

void aq_pace_count(void)
{
	struct aq_place place;

	if (aq_unpaced_has_passed() && aq_place_current(&place))
		count_free(place.device);
	aq_samples_look_all();
}

/* The device on which the launch has to be paid for; AQ_NO_DEVICE when it is free, or is not work. */
static int device_to_pay(const struct aq_work *work)
{
	aq_ceilings_look();
	int device = aq_is_captured(work->stream, work->per_thread) ? AQ_NO_DEVICE : aq_device_of_stream(work->stream);
	if (__builtin_expect(aq_unpaced_has_passed(), 0))
		count_free(device);
	if (device < 0 || !aq_ceiling_paces(&aq_limited->limits.device[device]))
		return AQ_NO_DEVICE;
	if (__builtin_expect(aq_is_paused(device), 0))
		aq_sit_out_pause(device); /* before what was paid in advance is used, too */
	return device;
}

/* For high priority: write to the page for the others. */
static __attribute__((noinline)) void want(int device, int64_t cost_ns)
{
	int32_t priority;
	uint32_t line = aq_ceiling_priority(&aq_limited->limits.device[device], &priority);

	if (line)
		aq_neighbours_announce(&aq_limited->node.priority, line, &announced[device], aq_now_ns(), cost_ns);
}

/* The price of a launch with a function and shape that were not timed yet. */
static __attribute__((noinline)) struct aq_launch_price price_unmeasured(int device, const struct aq_cost_entry *cost)
{
	uint64_t predicted = aq_cost_estimate(cost, 0);
	struct aq_launch_price price = { predicted ? AQ_PRICE_PREDICTED : AQ_PRICE_UNKNOWN, (int64_t)predicted };

	if (aq_ceiling_restrains(device))
		aq_admission_await_measurement(device, predicted ? AQ_SETTLE_PREDICTED_AT_ONCE : AQ_SETTLE_UNKNOWN_AT_ONCE);
	if (!predicted) /* asked last: what such launches cost may be known by now */
		price.ns = aq_settle_unknown_price(aq_pacers[device].settlement);
	return price;
}

static struct aq_launch_price price_of(int device, const struct aq_cost_entry *cost)
{
	uint64_t estimate = cost ? atomic_load_explicit(&cost->estimate_ns, memory_order_relaxed) : 0;

	return __builtin_expect(estimate != 0, 1) ? (struct aq_launch_price){ AQ_PRICE_KNOWN, (int64_t)estimate }
						  : price_unmeasured(device, cost);
}

/* The program ends, and calls this before the driver's own handler. */
static void settle_at_exit(void)
{
	aq_samples_look_all();
	for (int i = 0; aq_limited && i < AQ_MAX_DEVICES; i++) /* not in a forked child */
		if (atomic_load_explicit(&aq_pacers[i].is_metered, memory_order_relaxed) && !aq_samples_pending(i))
			aq_correction_conclude(i);
}

static void begin_timing(struct aq_ticket *ticket, int device, const struct aq_work *work, struct aq_cost_entry *cost,
			 const struct aq_launch_price *price)
{
	if (!atomic_exchange_explicit(&settles_at_exit, true, memory_order_relaxed))
		atexit(settle_at_exit); /* later than the driver's own, so it runs before */
	*ticket = (struct aq_ticket){ aq_sample_begin(device, work, cost, price), device };
}

CUresult aq_pace_begin(struct aq_ticket *ticket, const struct aq_work *work)
{
	bool limited;
	CUresult result = decide(&limited);

	*ticket = (struct aq_ticket){ 0 };
	int device = limited ? device_to_pay(work) : AQ_NO_DEVICE;
	if (device < 0)
		return result;
	struct aq_payer *payer = aq_payer_of_thread();
	struct aq_cost_entry *cost = __builtin_expect(payer != NULL, 1) ? aq_payer_cost(payer, device, work)
									: aq_cost_of_work(device, work);
	struct aq_launch_price price = price_of(device, cost);
	if (__builtin_expect(atomic_load_explicit(&aq_limited->limits.device[device].priority, memory_order_relaxed) > 0, 0))
		want(device, price.ns);
	if (__builtin_expect(payer != NULL, 1))
		aq_pay(payer, device, work, price.ns);
	else
		aq_pay_at_once(device, work, price.ns);
	if (aq_sample_is_wanted(device, cost, price.kind))
		begin_timing(ticket, device, work, cost, &price);
	return result;
}

void aq_pace_new_graph(CUgraphExec made)
{
	aq_costs_forget(made);
}

void aq_pace_open(struct aq_container *container)
{
	aq_pacers_open(&container->region);
	aq_ceilings_open(container);
}

void aq_pace_forget(void)
{
	aq_ceilings_forget();
	aq_pacers_forget();
	aq_correction_forget();
	aq_time_slots_forget();
	aq_payers_forget();
	for (unsigned i = 0; i < AQ_MAX_DEVICES; i++) {
		atomic_store(&announced[i].until_ns, 0);
		atomic_store(&announced[i].written_ns, 0);
	}
}
