/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/sample.h"

#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/relax.h"

#define SAMPLES 64
#define SAMPLES_FOR_KNOWN 56 /* that launches which are known may use: the others have to be timed */

enum sample_state {
	SAMPLE_EMPTY,
	SAMPLE_IDLE,
	SAMPLE_RECORDING,            /* the launching thread's, which uses the events without the gate … */
	SAMPLE_ORPHANED,             /* … and its context has ended meanwhile, with the events */
	SAMPLE_PENDING,
};

struct aq_sample {
	enum sample_state state;
	unsigned endings;            /* calls under way that may end its events' context: hands off */
	uint64_t owner;              /* as in struct aq_place */
	CUcontext context;           /* that its events live in */
	CUevent begin, end;
	struct aq_cost_entry *cost;
	int64_t paid_ns;             /* what the process had paid when it was recorded */
	/* the launch itself */
	enum aq_price price;
	bool is_metered;             /* it paid under a ceiling: it settles what it took */
	int64_t price_ns;            /* what it paid … */
	int64_t settled_ns;          /* … and what was settled since, while it ran */
	int64_t launched_at_ns;
	int64_t began_at_ns;         /* when it was first seen to run; 0 = not yet */
};

/* The timed launches of this process on one device. */
static struct timing {
	struct aq_latch gate; /* of samples and what has finished: their events are queried, made and destroyed under it */
	struct aq_sample samples[SAMPLES];
	struct aq_flight_time flight_time;
	_Atomic uint32_t pending; /* samples that are recording or pending */
} timings[AQ_MAX_DEVICES] = { [0 ... AQ_MAX_DEVICES - 1] = { .gate = AQ_LATCH_INITIALIZER } };

/* Take what a launch owes beyond what it has paid so far; the statistics follow. */
static void settle(struct aq_pacer *pacer, int64_t owed_ns)
{
	if (!owed_ns)
		return;
	aq_bucket_settle(pacer->bucket, owed_ns);
	atomic_fetch_add_explicit(&pacer->mine->busy_ns, (uint64_t)owed_ns, memory_order_relaxed);
}

/* A sample that is still ahead: of a long launch, the time that it has run is settled meanwhile. */
static void settle_running(struct aq_pacer *pacer, struct aq_sample *sample, int64_t now)
{
	if (!sample->began_at_ns) {
		if (aq_event_look(sample->begin) != AQ_EVENT_PASSED)
			return;
		sample->began_at_ns = now;
	}
	int64_t ran = now - sample->began_at_ns;
	if (ran > AQ_SETTLE_RUNNING_NS)
		ran = AQ_SETTLE_RUNNING_NS;
	int64_t owed = sample->is_metered ? aq_settle_owed(sample->price, sample->price_ns + sample->settled_ns, ran) : 0;
	if (owed <= 0)
		return;
	settle(pacer, owed);
	sample->settled_ns += owed;
}

/* It took so long. Also of launches that paid no ceiling: they make known what such launches cost. */
static void settle_finished(int device, struct aq_sample *sample, int64_t took_ns)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	int64_t counted = aq_flight_time_take(&timings[device].flight_time, took_ns);

	if (sample->price == AQ_PRICE_UNKNOWN)
		aq_settle_unknown_took(pacer->settlement, counted);
	if (!sample->is_metered)
		return;
	/* For a known launch what it paid alone decides: what was settled meanwhile goes back if it was too much. */
	settle(pacer, aq_settle_owed(sample->price, sample->price_ns, counted) - sample->settled_ns);
}

/* Learn from a sample that has finished. With the gate held, in a relaxed thread. */
static void look_at_sample(int device, struct aq_sample *sample, int64_t now)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	enum aq_event_look look = aq_event_look(sample->end);
	float milliseconds = 0;

	if (look == AQ_EVENT_AHEAD) {
		settle_running(pacer, sample, now);
		return;
	}
	if (look == AQ_EVENT_PASSED && aq_cuda.cuEventElapsedTime(&milliseconds, sample->begin, sample->end) == CUDA_SUCCESS &&
	    milliseconds >= 0) {
		if (sample->cost)
			aq_cost_learn(sample->cost, (uint64_t)((double)milliseconds * 1e6));
		settle_finished(device, sample, (int64_t)((double)milliseconds * 1e6));
	}
	if (sample->paid_ns > atomic_load_explicit(&pacer->flight.finished_ns, memory_order_relaxed))
		atomic_store_explicit(&pacer->flight.finished_ns, sample->paid_ns, memory_order_relaxed);
	atomic_store_explicit(&pacer->is_held_up, false, memory_order_relaxed);
	sample->state = look == AQ_EVENT_GONE ? SAMPLE_EMPTY : SAMPLE_IDLE;
}

/* Count what is left. A launch that has run for long is not waited for: perhaps it ends with the program. With the gate held. */
static void count_samples(int device, int64_t now)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	uint32_t pending = 0, unmeasured = 0;
	bool runs = false;
	int64_t since = 0;

	for (unsigned i = 0; i < SAMPLES; i++) {
		const struct aq_sample *sample = &timings[device].samples[i];

		if (sample->state != SAMPLE_RECORDING && sample->state != SAMPLE_PENDING)
			continue;
		pending++;
		bool has_begun = sample->began_at_ns != 0, is_endless = has_begun && now - sample->began_at_ns > AQ_SETTLE_RUNNING_NS;
		runs |= has_begun && !is_endless;
		if (sample->price == AQ_PRICE_KNOWN || sample->price == AQ_PRICE_UNEVEN)
			continue;
		unmeasured += !is_endless;
		int64_t paid_until = sample->launched_at_ns + sample->price_ns + sample->settled_ns;
		if (sample->is_metered && (!since || paid_until < since))
			since = paid_until;
	}
	if (!pending)
		aq_flight_time_end(&timings[device].flight_time);
	atomic_store_explicit(&timings[device].pending, pending, memory_order_relaxed);
	atomic_store_explicit(&pacer->unmeasured, unmeasured, memory_order_relaxed);
	atomic_store_explicit(&pacer->runs, runs, memory_order_relaxed);
	atomic_store_explicit(&pacer->mine->unsettled_since_ns, since, memory_order_relaxed);
}

void aq_samples_look(int device)
{
	struct timing *timing = &timings[device];

	if (aq_latch_is_inside())
		return;
	CUstreamCaptureMode mode = aq_relax();
	aq_latch_enter(&timing->gate);
	int64_t now = aq_now_ns();
	aq_flight_time_look(&timing->flight_time, now);
	for (unsigned i = 0; i < SAMPLES; i++)
		if (timing->samples[i].state == SAMPLE_PENDING && !timing->samples[i].endings)
			look_at_sample(device, &timing->samples[i], now);
	count_samples(device, now);
	aq_in_flight_look(&aq_pacers[device].flight, now);
	aq_latch_leave(&timing->gate);
	aq_restrict(mode);
}

/* What has finished is settled where the program may be about to end, or to rest. */
void aq_samples_look_all(void)
{
	for (unsigned i = 0; i < AQ_MAX_DEVICES; i++)
		if (atomic_load_explicit(&timings[i].pending, memory_order_relaxed))
			aq_samples_look((int)i);
}

bool aq_samples_pending(int device)
{
	return atomic_load_explicit(&timings[device].pending, memory_order_relaxed);
}

/* Never with the gate held: while the stream is full the driver waits in here, perhaps for what another thread is to launch. */
static CUresult record(CUevent event, const struct aq_work *work)
{
	return work->per_thread ? aq_cuda.cuEventRecord_ptsz(event, work->stream) : aq_cuda.cuEventRecord(event, work->stream);
}

static void discard(struct aq_sample *sample)
{
	aq_cuda.cuEventDestroy_v2(sample->begin);
	aq_cuda.cuEventDestroy_v2(sample->end);
	sample->state = SAMPLE_EMPTY;
}

/* Events live in the context that is current when they are made, and are recorded in its streams only. */
static bool make_events(struct aq_sample *sample, CUcontext context)
{
	bool pushed, made = false;

	if (!aq_context_enter(context, &pushed))
		return false;
	if (aq_cuda.cuEventCreate(&sample->begin, CU_EVENT_DEFAULT) == CUDA_SUCCESS) {
		made = aq_cuda.cuEventCreate(&sample->end, CU_EVENT_DEFAULT) == CUDA_SUCCESS;
		if (!made)
			aq_cuda.cuEventDestroy_v2(sample->begin);
	}
	aq_context_leave(pushed);
	return made;
}

/* An idle sample with events in the context, or an empty one to make events for, or one that another context does not use now: a context
 * that once used them all must not keep the others from being timed. With the gate held, so that no context of an idle, unmarked sample can
 * end meanwhile. */
static struct aq_sample *free_sample(int device, uint64_t owner, CUcontext context, unsigned most)
{
	struct aq_sample *empty = NULL, *foreign = NULL;

	for (unsigned i = 0; i < most; i++) {
		struct aq_sample *sample = &timings[device].samples[i];

		if (sample->state == SAMPLE_EMPTY && !empty)
			empty = sample;
		if (sample->state != SAMPLE_IDLE || sample->endings)
			continue;
		if (sample->context == context)
			return sample;
		foreign = sample;
	}
	if (!empty && foreign) {
		discard(foreign);
		empty = foreign;
	}
	if (!empty || !make_events(empty, context))
		return NULL;
	empty->owner = owner;
	empty->context = context;
	empty->endings = 0;
	return empty;
}

/* The launching thread is done with its sample: `state` comes next, SAMPLE_EMPTY for events that could not be recorded. */
static void end_recording(int device, struct aq_sample *sample, enum sample_state state)
{
	aq_latch_enter(&timings[device].gate);
	if (sample->state == SAMPLE_ORPHANED)
		sample->state = SAMPLE_EMPTY;
	else if (state != SAMPLE_EMPTY)
		sample->state = state;
	else if (sample->endings) /* its events may be about to end: the next user finds that they cannot be recorded */
		sample->state = SAMPLE_IDLE;
	else
		discard(sample);
	aq_latch_leave(&timings[device].gate);
}

/* With the gate held. */
static void prepare_sample(int device, struct aq_sample *sample, struct aq_cost_entry *cost, const struct aq_launch_price *price)
{
	struct aq_pacer *pacer = &aq_pacers[device];
	int64_t now = aq_now_ns();

	sample->state = SAMPLE_RECORDING;
	sample->cost = cost;
	sample->paid_ns = atomic_load_explicit(&pacer->flight.submitted_ns, memory_order_relaxed);
	atomic_store_explicit(&pacer->marked_ns, sample->paid_ns, memory_order_relaxed);
	sample->price = price->kind == AQ_PRICE_KNOWN && cost && aq_cost_is_uneven(cost) ? AQ_PRICE_UNEVEN : price->kind;
	sample->price_ns = price->ns;
	sample->settled_ns = 0;
	sample->is_metered = atomic_load_explicit(&pacer->is_metered, memory_order_relaxed);
	sample->launched_at_ns = now;
	sample->began_at_ns = 0;
	aq_flight_time_begin(&timings[device].flight_time, now);
	count_samples(device, now);
}

struct aq_sample *aq_sample_begin(int device, const struct aq_work *work, struct aq_cost_entry *cost, const struct aq_launch_price *price)
{
	CUcontext context = aq_context_of_stream(work->stream);
	struct aq_place place;

	if (!context || !aq_place_of_stream(work->stream, &place))
		return NULL;
	aq_latch_enter(&timings[device].gate);
	struct aq_sample *sample = free_sample(device, place.owner, context, price->kind == AQ_PRICE_KNOWN ? SAMPLES_FOR_KNOWN : SAMPLES);

	if (sample)
		prepare_sample(device, sample, cost, price);
	aq_latch_leave(&timings[device].gate);
	if (!sample || record(sample->begin, work) == CUDA_SUCCESS)
		return sample;
	end_recording(device, sample, SAMPLE_EMPTY);
	return NULL;
}

/* Is the sample's context there, and not about to end? */
static bool is_safe(int device, const struct aq_sample *sample)
{
	aq_latch_enter(&timings[device].gate);
	bool safe = sample->state == SAMPLE_RECORDING && !sample->endings;
	aq_latch_leave(&timings[device].gate);
	return safe;
}

void aq_sample_end(int device, struct aq_sample *sample, const struct aq_work *work, CUresult launched)
{
	if (launched != CUDA_SUCCESS) {
		if (sample->is_metered)
			settle(&aq_pacers[device], -sample->price_ns);
		end_recording(device, sample, SAMPLE_IDLE);
	} else if (!is_safe(device, sample)) {
		end_recording(device, sample, SAMPLE_IDLE);
	} else {
		end_recording(device, sample, record(sample->end, work) == CUDA_SUCCESS ? SAMPLE_PENDING : SAMPLE_EMPTY);
	}
}

/* The samples with events in the context: one more call may end it, or one less, which did or did not. Not from inside a latch: the
 * events are found gone when they are used next. */
static void mark_samples(const struct aq_ending *ending, unsigned change, bool has_ended)
{
	if (aq_latch_is_inside())
		return;
	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		aq_latch_enter(&timings[device].gate);
		for (unsigned i = 0; i < SAMPLES; i++) {
			struct aq_sample *sample = &timings[device].samples[i];

			if (sample->state == SAMPLE_EMPTY || sample->state == SAMPLE_ORPHANED ||
			    !aq_ending_has(ending, device, sample->owner, sample->context))
				continue;
			/* One that was made since the call began has no mark, and no use if the context ended. */
			sample->endings += sample->endings || change == 1 ? change : 0;
			if (has_ended)
				sample->state = sample->state == SAMPLE_RECORDING ? SAMPLE_ORPHANED : SAMPLE_EMPTY;
		}
		aq_latch_leave(&timings[device].gate);
	}
}

void aq_samples_context_ending(const struct aq_ending *ending)
{
	mark_samples(ending, 1, false);
}

void aq_samples_context_ended(const struct aq_ending *ending, bool has_ended)
{
	mark_samples(ending, -1u, has_ended);
}

void aq_samples_forget(void)
{
	for (unsigned i = 0; i < AQ_MAX_DEVICES; i++) {
		aq_latch_init(&timings[i].gate);
		for (unsigned j = 0; j < SAMPLES; j++)
			timings[i].samples[j].state = SAMPLE_EMPTY;
		aq_flight_time_end(&timings[i].flight_time);
		atomic_store(&timings[i].pending, 0);
	}
}
