#include "interpose/pace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "interpose/capture.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/gate.h"
#include "interpose/latch.h"
#include "interpose/neighbours.h"
#include "interpose/own_use.h"
#include "interpose/prefetch.h"
#include "interpose/relax.h"
#include "limit/bucket.h"
#include "limit/control.h"
#include "limit/cost.h"
#include "limit/in_flight.h"
#include "log.h"
#include "shim.h"
#include "uncancelled.h"

#define BATCH_NS 250000              /* a thread draws credit for this much device time at once, or for one launch if that is longer */
#define NAP_MIN_NS 50000
#define NAP_MAX_NS 2000000
#define SAMPLES 64
#define FREE_LAUNCHES 1024           /* that a thread makes uncounted, unless it waits for the device before */
#define THREAD_CACHE 64u             /* power of two */
#define PAYERS 512u
#define NEVER_FREE 1u                /* no page has this generation: it is odd and they start at 2 */

enum sample_state {
	SAMPLE_EMPTY,
	SAMPLE_IDLE,
	SAMPLE_RECORDING,            /* the launching thread's, which uses the events without the gate … */
	SAMPLE_ORPHANED,             /* … and whose context has ended meanwhile, the events with it */
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
};

/* This process on one device. */
static struct pacer {
	struct aq_latch gate;        /* of samples and what has finished: their events are asked, made and destroyed with it */
	struct aq_bucket *bucket;
	struct aq_slot_device *mine;
	struct aq_cost_table *_Atomic costs;
	struct aq_sample samples[SAMPLES];
	struct aq_in_flight flight;
	_Atomic int64_t marked_ns;     /* flight.submitted_ns at the last sample … */
	_Atomic int64_t mark_every_ns; /* … and how much later the next launch is timed, to see the work finish */
	_Atomic uint64_t capacity_bytes;       /* of the device; 0 = not asked yet */
	_Atomic int64_t without_turn_until_ns; /* the container's turn did not come: it runs without one */
	_Atomic uint64_t turn;                 /* the container's turn now, as last asked; 0 = there are none */
	_Atomic uint64_t fetched_turn;         /* the one at whose start this process's memory was sent for */
	struct aq_priority_own wanted;
} pacers[AQ_MAX_DEVICES] = { [0 ... AQ_MAX_DEVICES - 1] = { .gate = AQ_LATCH_INITIALIZER } };

/* One thread, on all devices. */
static struct payer {
	_Atomic pid_t owner;         /* 0 = free; an ended thread's place is taken over when all are taken */
	int64_t credit_ns[AQ_MAX_DEVICES];
	uint64_t launches[AQ_MAX_DEVICES];
	struct cached {
		const void *function;
		uint64_t blocks;
		uint32_t threads;
		uint32_t device;
		struct aq_cost_entry *cost;
	} cache[THREAD_CACHE];
} payers[PAYERS];

static const _Atomic uint64_t nothing_to_watch;
const _Atomic uint64_t *_Atomic aq_pace_watched = &nothing_to_watch;
_Atomic uint64_t aq_pace_seen = NEVER_FREE;

__thread int64_t aq_pace_free_left; /* 0 to begin with: the first launch is counted at once */
static __thread int64_t free_given; /* what it was when the thread came by */

static struct aq_limits *limits;
static const struct aq_region *region;
static struct aq_node_pages *node;
static __thread struct payer *this_payer;

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void nap(int64_t wanted_ns)
{
	aq_sleep(wanted_ns < NAP_MIN_NS ? NAP_MIN_NS : wanted_ns > NAP_MAX_NS ? NAP_MAX_NS : wanted_ns); /* or less: the caller looks again */
}

/* ---- who is paced ---------------------------------------------------------------------------------------------- */

static bool has_ceiling(uint32_t percent)
{
	return percent > 0 && percent < 100;
}

/* The device's line of the priority page, if this container stands above or below others there; else 0. */
static inline uint32_t priority_of(const struct aq_device_limit *device, int32_t *priority)
{
	uint32_t line = atomic_load_explicit(&device->priority_line, memory_order_relaxed);

	*priority = atomic_load_explicit(&device->priority, memory_order_relaxed);
	bool takes_part = *priority < 0 || (*priority > 0 && node->priority.writable);
	return node->priority.magic && takes_part ? line : 0;
}

/* The device's line of the page of turns, if this container may hold more of the device than it is guaranteed; else 0. */
static inline uint32_t turns_of(const struct aq_device_limit *device)
{
	uint32_t line = atomic_load_explicit(&device->priority_line, memory_order_relaxed);

	return node->turns.writable && atomic_load_explicit(&device->burst_bytes, memory_order_relaxed) ? line : 0;
}

static inline bool is_paced(const struct aq_device_limit *device)
{
	int32_t priority;

	return has_ceiling(atomic_load_explicit(&device->sm_percent, memory_order_relaxed)) ||
	       atomic_load_explicit(&device->pause, memory_order_relaxed) || priority_of(device, &priority) || turns_of(device);
}

/* The ceiling that holds now: the device's own, or less while a container of higher priority wants the device. */
static uint32_t ceiling_of(const struct aq_device_limit *device, int64_t now)
{
	uint32_t percent = atomic_load_explicit(&device->sm_percent, memory_order_relaxed);
	int32_t priority;
	uint32_t line = priority_of(device, &priority);

	return line && priority < 0 ? aq_neighbours_percent(&node->priority, line, now, has_ceiling(percent) ? percent : 0) : percent;
}

/* Is that ceiling, which holds now, there for the sake of higher priority? Then what was saved up before is not for now. */
static bool is_trickle(int device, uint32_t percent)
{
	return percent != atomic_load_explicit(&limits->device[device].sm_percent, memory_order_relaxed);
}

/* The part of the device by which what this process has in flight is measured: what others of low priority have there counts as well. */
static uint32_t part_of(int device)
{
	int32_t priority;

	return priority_of(&limits->device[device], &priority) && priority < 0 ? aq_in_flight_part(&pacers[device].flight) : AQ_PART_ONE;
}

/* Take the limits as they are now, and let launches pass freely if they have nothing to say about compute. */
static void look_at_limits(void)
{
	uint64_t generation = atomic_load_explicit(&limits->page->generation, memory_order_relaxed);
	bool paced = false;

	if (aq_limits_changed(limits))
		aq_limits_refresh(limits);
	for (uint32_t i = 0; i < atomic_load_explicit(&limits->device_count, memory_order_acquire); i++)
		paced |= is_paced(&limits->device[i]);
	/* A page that was being written meanwhile has another generation by now, and the next launch looks again. */
	atomic_store_explicit(&aq_pace_seen, paced ? NEVER_FREE : generation, memory_order_relaxed);
}

void aq_pace_open(struct aq_limits *new_limits, const struct aq_region *new_region, struct aq_node_pages *new_node)
{
	aq_gates_open();
	limits = new_limits;
	region = new_region;
	node = new_node;
	for (uint32_t i = 0; i < AQ_MAX_DEVICES; i++) {
		pacers[i].bucket = &aq_region_line(region, i)->compute;
		pacers[i].mine = aq_region_mine(region, i);
	}
	atomic_store_explicit(&aq_pace_seen, NEVER_FREE, memory_order_relaxed);
	atomic_store_explicit(&aq_pace_watched, &limits->page->generation, memory_order_release);
	look_at_limits();
}

void aq_pace_pass(void)
{
	aq_gates_open();
	atomic_store_explicit(&aq_pace_seen, 0, memory_order_relaxed);
	atomic_store_explicit(&aq_pace_watched, &nothing_to_watch, memory_order_relaxed);
}

/* ---- samples --------------------------------------------------------------------------------------------------- */

/* Learn from a sample that has finished. With the gate held, in a relaxed thread. */
static void harvest_one(struct pacer *pacer, struct aq_sample *sample)
{
	enum aq_event_look look = aq_event_look(sample->end);
	float milliseconds = 0;

	if (look == AQ_EVENT_AHEAD)
		return;
	if (look == AQ_EVENT_PASSED && sample->cost &&
	    aq_cuda.cuEventElapsedTime(&milliseconds, sample->begin, sample->end) == CUDA_SUCCESS)
		aq_cost_learn(sample->cost, (uint64_t)((double)milliseconds * 1e6));
	if (sample->paid_ns > atomic_load_explicit(&pacer->flight.finished_ns, memory_order_relaxed))
		atomic_store_explicit(&pacer->flight.finished_ns, sample->paid_ns, memory_order_relaxed);
	sample->state = look == AQ_EVENT_GONE ? SAMPLE_EMPTY : SAMPLE_IDLE;
}

static void harvest(struct pacer *pacer)
{
	if (aq_latch_is_inside())
		return;
	CUstreamCaptureMode mode = aq_relax();
	aq_latch_enter(&pacer->gate);
	for (unsigned i = 0; i < SAMPLES; i++)
		if (pacer->samples[i].state == SAMPLE_PENDING && !pacer->samples[i].endings)
			harvest_one(pacer, &pacer->samples[i]);
	aq_in_flight_look(&pacer->flight, now_ns());
	aq_latch_leave(&pacer->gate);
	aq_restrict(mode);
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

/* An idle sample whose events live in the context, or an empty one to make events for, or one that another context does not use just now: a context
 * that once used them all must not keep the others from being timed for ever. With the gate held, so that no context of an idle sample
 * without a mark can end meanwhile. */
static struct aq_sample *free_sample(struct pacer *pacer, uint64_t owner, CUcontext context)
{
	struct aq_sample *empty = NULL, *foreign = NULL;

	for (unsigned i = 0; i < SAMPLES; i++) {
		struct aq_sample *sample = &pacer->samples[i];

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
static void end_recording(struct pacer *pacer, struct aq_sample *sample, enum sample_state state)
{
	aq_latch_enter(&pacer->gate);
	if (sample->state == SAMPLE_ORPHANED)
		sample->state = SAMPLE_EMPTY;
	else if (state != SAMPLE_EMPTY)
		sample->state = state;
	else if (sample->endings) /* its events may be about to go: whoever uses it next finds that they cannot be recorded */
		sample->state = SAMPLE_IDLE;
	else
		discard(sample);
	aq_latch_leave(&pacer->gate);
}

static __attribute__((noinline)) struct aq_sample *begin_sample(struct pacer *pacer, const struct aq_work *work, struct aq_cost_entry *cost)
{
	CUcontext context = aq_context_of_stream(work->stream);
	struct aq_place place;

	if (!context || !aq_place_of_stream(work->stream, &place))
		return NULL;
	aq_latch_enter(&pacer->gate);
	struct aq_sample *sample = free_sample(pacer, place.owner, context);

	if (sample) {
		sample->state = SAMPLE_RECORDING;
		sample->cost = cost;
		sample->paid_ns = atomic_load_explicit(&pacer->flight.submitted_ns, memory_order_relaxed);
		atomic_store_explicit(&pacer->marked_ns, sample->paid_ns, memory_order_relaxed);
	}
	aq_latch_leave(&pacer->gate);
	if (!sample || record(sample->begin, work) == CUDA_SUCCESS)
		return sample;
	end_recording(pacer, sample, SAMPLE_EMPTY);
	return NULL;
}

/* Is the sample's context there, and not about to end? */
static bool is_safe(struct pacer *pacer, const struct aq_sample *sample)
{
	aq_latch_enter(&pacer->gate);
	bool safe = sample->state == SAMPLE_RECORDING && !sample->endings;
	aq_latch_leave(&pacer->gate);
	return safe;
}

void aq_pace_end_sample(const struct aq_ticket *ticket, const struct aq_work *work, CUresult launched)
{
	struct pacer *pacer = &pacers[ticket->device];
	struct aq_sample *sample = ticket->sample;

	if (launched != CUDA_SUCCESS || !is_safe(pacer, sample))
		end_recording(pacer, sample, SAMPLE_IDLE);
	else
		end_recording(pacer, sample, record(sample->end, work) == CUDA_SUCCESS ? SAMPLE_PENDING : SAMPLE_EMPTY);
}

/* The samples with events in the context: one more call may end it, or one less, which did or did not. Not from inside a latch: the
 * events are found gone when they are used next. */
static void mark_samples(const struct aq_ending *ending, unsigned change, bool has_ended)
{
	if (aq_latch_is_inside())
		return;
	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		aq_latch_enter(&pacers[device].gate);
		for (unsigned i = 0; i < SAMPLES; i++) {
			struct aq_sample *sample = &pacers[device].samples[i];

			if (sample->state == SAMPLE_EMPTY || sample->state == SAMPLE_ORPHANED ||
			    !aq_ending_has(ending, device, sample->owner, sample->context))
				continue;
			/* One that was made since the call began has no mark, and no use if the context ended. */
			sample->endings += sample->endings || change == 1 ? change : 0;
			if (has_ended)
				sample->state = sample->state == SAMPLE_RECORDING ? SAMPLE_ORPHANED : SAMPLE_EMPTY;
		}
		aq_latch_leave(&pacers[device].gate);
	}
}

void aq_pace_context_ending(const struct aq_ending *ending)
{
	mark_samples(ending, 1, false);
}

void aq_pace_context_ended(const struct aq_ending *ending, bool has_ended)
{
	mark_samples(ending, -1u, has_ended);
}

/* ---- paying ---------------------------------------------------------------------------------------------------- */

static bool has_ended(pid_t thread)
{
	return syscall(SYS_tgkill, getpid(), thread, 0) != 0 && errno == ESRCH;
}

/* A place among the payers that no living thread has; with what its last owner did not use. */
static struct payer *claim(pid_t thread, bool from_the_dead)
{
	for (unsigned i = 0; i < PAYERS; i++) {
		pid_t owner = atomic_load_explicit(&payers[i].owner, memory_order_relaxed);

		if ((from_the_dead ? owner != 0 && has_ended(owner) : owner == 0) &&
		    atomic_compare_exchange_strong(&payers[i].owner, &owner, thread))
			return &payers[i];
	}
	return NULL;
}

/* NULL when more threads than PAYERS launch: this one then pays each launch from the bucket itself. No hook on the end of a thread
 * is needed, nor the newer libc that has one. */
static __attribute__((noinline)) struct payer *new_payer(void)
{
	int said = errno; /* the application's, and none of our business */
	pid_t thread = (pid_t)syscall(SYS_gettid);

	this_payer = claim(thread, false);
	if (!this_payer)
		this_payer = claim(thread, true);
	errno = said;
	return this_payer;
}

static inline struct payer *payer_of_thread(void)
{
	return __builtin_expect(this_payer != NULL, 1) ? this_payer : new_payer();
}

static struct aq_cost_table *costs_of(struct pacer *pacer)
{
	struct aq_cost_table *costs = atomic_load_explicit(&pacer->costs, memory_order_acquire);

	if (__builtin_expect(costs != NULL, 1))
		return costs;
	struct aq_cost_table *made = calloc(1, sizeof(*made));
	if (made && !atomic_compare_exchange_strong(&pacer->costs, &costs, made)) {
		free(made);
		return costs;
	}
	return made;
}

/* Where in its cache a thread looks. Handles are addresses; that two launches in turn share a place costs a look into the table each time. */
static unsigned cache_index(const struct aq_work *work)
{
	uint64_t bits = (uint64_t)(uintptr_t)work->function >> 4 ^ work->blocks ^ (uint64_t)work->threads << 7;

	return (unsigned)(bits ^ bits >> 6 ^ bits >> 12) & (THREAD_CACHE - 1);
}

static __attribute__((noinline)) struct aq_cost_entry *look_up_cost(struct cached *cached, int device, const struct aq_work *work)
{
	struct aq_cost_table *costs = costs_of(&pacers[device]);

	*cached = (struct cached){ work->function, work->blocks, work->threads, (uint32_t)device,
				   costs ? aq_cost_find(costs, work->function, work->blocks, work->threads) : NULL };
	return cached->cost;
}

static struct aq_cost_entry *cost_of(struct payer *payer, int device, const struct aq_work *work)
{
	struct cached *cached = &payer->cache[cache_index(work)];

	if (__builtin_expect(cached->function == work->function && cached->blocks == work->blocks && cached->threads == work->threads &&
			     cached->device == (uint32_t)device && cached->cost, 1))
		return cached->cost;
	return look_up_cost(cached, device, work);
}

/* Now and then, best while there is nothing to do but wait: compare what the driver measured with the ceiling. */
static void correct(int device, int64_t now, uint32_t percent, bool is_held)
{
	uint32_t share_q16, periods = aq_control_take_lease(pacers[device].bucket, now, is_held);

	if (!periods)
		return;
	int cancel = aq_hold_cancel();
	if (aq_own_use(region, limits->device[device].uuid_text, device, &share_q16))
		aq_control_correct(pacers[device].bucket, now, periods, percent, share_q16);
	aq_allow_cancel(cancel);
}

/* A thread that wants to launch, from the first moment at which it may not. */
struct wait {
	struct pacer *pacer;
	int64_t since_ns; /* 0 = it did not have to wait yet */
};

static void begin_wait(struct wait *wait, int64_t now)
{
	if (wait->since_ns)
		return;
	wait->since_ns = now;
	atomic_fetch_add_explicit(&wait->pacer->mine->waiting, 1, memory_order_relaxed);
}

static void end_wait(const struct wait *wait)
{
	if (!wait->since_ns)
		return;
	atomic_fetch_sub_explicit(&wait->pacer->mine->waiting, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&wait->pacer->mine->throttled_ns, (uint64_t)(now_ns() - wait->since_ns), memory_order_relaxed);
}

static bool is_paused(int device)
{
	return atomic_load_explicit(&limits->device[device].pause, memory_order_relaxed);
}

/* Nobody else may launch meanwhile, so this looks at the limits itself. */
static void wait_while_paused(int device, struct wait *wait)
{
	while (is_paused(device)) {
		begin_wait(wait, now_ns());
		harvest(&pacers[device]);
		nap(NAP_MAX_NS);
		if (aq_limits_changed(limits))
			look_at_limits();
	}
}

static __attribute__((noinline)) void sit_out_pause(int device)
{
	struct wait wait = { &pacers[device], 0 };

	wait_while_paused(device, &wait);
	end_wait(&wait);
}

/* By what all processes of the container are known on the page of turns. */
static uint64_t turns_owner(void)
{
	struct aq_region_header *header = (struct aq_region_header *)(void *)region->base;
	uint64_t owner = atomic_load_explicit(&header->turns_owner, memory_order_relaxed), made;

	if (__builtin_expect(owner != 0, 1))
		return owner;
	memcpy(&made, (const void *)getauxval(AT_RANDOM), sizeof(made)); /* the kernel gives each program sixteen random bytes */
	made |= 1;
	return atomic_compare_exchange_strong(&header->turns_owner, &owner, made) ? made : owner;
}

/* Ask for the container's turn. Only what it holds beyond the guarantee makes others lose pages: without that it need not ask. */
static struct aq_turns_answer ask_for_turn(int device, int64_t now)
{
	uint32_t line = turns_of(&limits->device[device]);
	struct aq_region_device *held = aq_region_line(region, (uint32_t)device);
	uint64_t beyond = atomic_load_explicit(&held->virtual_bytes, memory_order_relaxed);

	if (__builtin_expect(!line || !beyond, 1))
		return (struct aq_turns_answer){ .may_run = true };
	return aq_neighbours_turn(&node->turns, line, &(struct aq_turns_party){
		.owner = turns_owner(),
		.demand_bytes = beyond + atomic_load_explicit(&held->used_bytes, memory_order_relaxed),
		.capacity_bytes = atomic_load_explicit(&pacers[device].capacity_bytes, memory_order_relaxed),
	}, now);
}

/* Wait until it is the container's turn; or, when that does not come, go on without one for a while. False = there was nothing to wait for. */
static bool wait_for_turn(int device, struct wait *wait)
{
	struct pacer *pacer = &pacers[device];
	int64_t now = now_ns(), asked_since = now;
	struct aq_turns_answer answer = ask_for_turn(device, now);

	if (__builtin_expect(answer.may_run, 1)) {
		atomic_store_explicit(&pacer->turn, answer.turn, memory_order_relaxed);
		return false;
	}
	if (now < atomic_load_explicit(&pacer->without_turn_until_ns, memory_order_relaxed))
		return false;
	begin_wait(wait, now);
	while (!answer.may_run) {
		harvest(pacer);
		if (now - asked_since > answer.patience_ns) {
			aq_log_warn("device %s is never free for this container: it goes on without a turn",
				    limits->device[device].uuid_text);
			atomic_store_explicit(&pacer->without_turn_until_ns, now + AQ_TURNS_LEAST_NS, memory_order_relaxed);
			break;
		}
		nap(answer.again_ns);
		if (aq_limits_changed(limits))
			look_at_limits();
		now = now_ns();
		answer = ask_for_turn(device, now);
	}
	return true;
}

/* Wait until the device may be used for `batch_ns`, and take that out of the bucket if there is a ceiling. */
static void draw(int device, int64_t batch_ns)
{
	struct pacer *pacer = &pacers[device];
	struct wait wait = { pacer, 0 };

	for (;;) {
		if (aq_limits_changed(limits))
			look_at_limits();
		wait_while_paused(device, &wait);
		if (wait_for_turn(device, &wait))
			continue;

		int64_t now = now_ns();
		uint32_t percent = ceiling_of(&limits->device[device], now);
		if (!has_ceiling(percent)) {
			aq_control_interrupted(pacer->bucket);
			aq_bucket_interrupted(pacer->bucket);
			break;
		}
		if (is_trickle(device, percent))
			aq_bucket_spill(pacer->bucket, BATCH_NS);
		bool has_paid = aq_bucket_pay(pacer->bucket, now, percent, batch_ns);
		correct(device, now, percent, !has_paid);
		if (has_paid)
			break;
		begin_wait(&wait, now);
		harvest(pacer);
		nap(aq_bucket_wait_ns(pacer->bucket, percent));
	}
	end_wait(&wait);
}

/* Until so much more may be launched beside what is unfinished; or, when nothing is finished for long, no longer. */
static void wait_for_progress(int device, uint32_t part, int64_t cost_ns)
{
	struct pacer *pacer = &pacers[device];
	int64_t finished = -1, until = 0;

	while (!aq_in_flight_has_room(&pacer->flight, part, cost_ns)) {
		int64_t now = now_ns(), before = finished;

		finished = atomic_load_explicit(&pacer->flight.finished_ns, memory_order_relaxed);
		if (finished != before)
			until = now + aq_in_flight_patience_ns(&pacer->flight, part);
		if (now >= until) {
			aq_in_flight_give_up(&pacer->flight);
			return;
		}
		nap(aq_in_flight_stretch(NAP_MIN_NS, part));
		harvest(pacer);
		part = part_of(device);
	}
}

/* What may be brought to the device at the start of a turn: all that this process may have there beside what cannot leave it and what its
 * siblings want there. */
static uint64_t room_for_virtual(int device)
{
	struct aq_region_device *held = aq_region_line(region, (uint32_t)device);
	uint64_t capacity = atomic_load_explicit(&pacers[device].capacity_bytes, memory_order_relaxed);
	uint64_t mine = aq_virtual_used_bytes(aq_region_virtual(region, (uint32_t)region->slot_index, (uint32_t)device));
	uint64_t all = atomic_load_explicit(&held->used_bytes, memory_order_relaxed) +
		       atomic_load_explicit(&held->virtual_bytes, memory_order_relaxed);
	uint64_t others = all > mine ? all - mine : 0;

	return capacity > others ? capacity - others : 0;
}

/* In the first launch of a turn: others had the device meanwhile, and the driver put their pages where this process's were. */
static void fetch_for_turn(const struct aq_place *place, const struct aq_work *work)
{
	struct pacer *pacer = &pacers[place->device];
	uint64_t turn = atomic_load_explicit(&pacer->turn, memory_order_relaxed);
	uint64_t fetched = atomic_load_explicit(&pacer->fetched_turn, memory_order_relaxed);

	if (__builtin_expect(!turn || turn == fetched, 1))
		return;
	if (atomic_compare_exchange_strong(&pacer->fetched_turn, &fetched, turn))
		aq_prefetch(place, work->stream, work->per_thread, room_for_virtual(place->device));
}

static void learn_capacity(const struct aq_place *place)
{
	size_t bytes = 0;

	if (__builtin_expect(atomic_load_explicit(&pacers[place->device].capacity_bytes, memory_order_relaxed) != 0, 1))
		return;
	if (aq_cuda.cuDeviceTotalMem_v2(&bytes, place->ordinal) != CUDA_SUCCESS || !bytes)
		bytes = SIZE_MAX; /* what is not known is not oversubscribed */
	atomic_store_explicit(&pacers[place->device].capacity_bytes, bytes, memory_order_relaxed);
}

/* By a thread without a place among the payers. */
static __attribute__((noinline)) void pay_at_once(const struct aq_work *work)
{
	struct aq_place place;

	if (!aq_place_of_stream(work->stream, &place) || place.device < 0)
		return;
	learn_capacity(&place);
	draw(place.device, AQ_COST_UNKNOWN_NS);
}

/* Where the driver will refuse the launch, for want of a context, the debt stays until one that it takes. */
static __attribute__((noinline)) void refill_credit(struct payer *payer, int device, const struct aq_work *work, int64_t cost_ns)
{
	struct pacer *pacer = &pacers[device];
	struct aq_place place;

	if (!aq_place_of_stream(work->stream, &place) || place.device != device)
		return;
	learn_capacity(&place);
	harvest(pacer);
	uint32_t part = part_of(device);
	int64_t step = aq_in_flight_step_ns(part), batch = step < BATCH_NS ? step : BATCH_NS;

	if (batch < cost_ns)
		batch = cost_ns;
	atomic_store_explicit(&pacer->mark_every_ns, step, memory_order_relaxed);
	wait_for_progress(device, part, batch); /* before it draws: whoever has drawn launches, whatever begins meanwhile */
	draw(device, batch);
	fetch_for_turn(&place, work);
	payer->credit_ns[device] += batch;
	atomic_fetch_add_explicit(&pacer->mine->launches, payer->launches[device], memory_order_relaxed);
	atomic_fetch_add_explicit(&pacer->mine->busy_ns, (uint64_t)batch, memory_order_relaxed);
	atomic_fetch_add_explicit(&pacer->flight.submitted_ns, batch, memory_order_relaxed);
	payer->launches[device] = 0;
}

/* From inside a latch nothing is timed: a launch that begins there ends there. */
static bool wants_sample(struct pacer *pacer, struct aq_cost_entry *cost)
{
	if (aq_latch_is_inside())
		return false;
	bool wanted = cost && aq_cost_wants_sample(cost);
	return wanted || atomic_load_explicit(&pacer->flight.submitted_ns, memory_order_relaxed) -
				 atomic_load_explicit(&pacer->marked_ns, memory_order_relaxed) >=
			 atomic_load_explicit(&pacer->mark_every_ns, memory_order_relaxed);
}

/* The first statement of a paced launch when nothing was decided yet. */
static CUresult decide(bool *limited)
{
	enum aq_mode mode = aq_mode();

	*limited = mode == AQ_LIMITED;
	if (mode == AQ_PASSING) {
		aq_pace_pass();
		free_given = aq_pace_free_left = INT64_MAX; /* there is nothing to count in */
	}
	return mode == AQ_REFUSING ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

static void count_free(int device)
{
	int64_t passed = free_given - aq_pace_free_left;

	free_given = aq_pace_free_left = FREE_LAUNCHES;
	if (device >= 0)
		atomic_fetch_add_explicit(&pacers[device].mine->launches, (uint64_t)passed, memory_order_relaxed);
}

void aq_pace_count(void)
{
	struct aq_place place;

	if (aq_pace_free_left != free_given && aq_place_current(&place))
		count_free(place.device);
}

/* The device on which the launch has to be paid for; AQ_NO_DEVICE when it is free, or is not work. */
static int device_to_pay(const struct aq_work *work)
{
	if (__builtin_expect(aq_limits_changed(limits), 0))
		look_at_limits();
	int device = aq_is_captured(work->stream, work->per_thread) ? AQ_NO_DEVICE : aq_device_of_stream(work->stream);
	if (__builtin_expect(aq_pace_free_left != free_given, 0))
		count_free(device);
	if (device < 0 || !is_paced(&limits->device[device]))
		return AQ_NO_DEVICE;
	if (__builtin_expect(is_paused(device), 0))
		sit_out_pause(device); /* before what was paid in advance is used, too */
	return device;
}

/* Of high priority: tell the others. */
static __attribute__((noinline)) void want(int device, int64_t cost_ns)
{
	int32_t priority;
	uint32_t line = priority_of(&limits->device[device], &priority);

	if (line)
		aq_neighbours_want(&node->priority, line, &pacers[device].wanted, now_ns(), cost_ns);
}

static struct aq_cost_entry *pay(struct payer *payer, int device, const struct aq_work *work)
{
	struct aq_cost_entry *cost = cost_of(payer, device, work);
	int64_t cost_ns = (int64_t)aq_cost_estimate(cost, AQ_COST_UNKNOWN_NS);

	payer->launches[device]++;
	payer->credit_ns[device] -= cost_ns;
	if (__builtin_expect(atomic_load_explicit(&limits->device[device].priority, memory_order_relaxed) > 0, 0))
		want(device, cost_ns);
	if (__builtin_expect(payer->credit_ns[device] < 0, 0))
		refill_credit(payer, device, work, cost_ns);
	return cost;
}

CUresult aq_pace_begin(struct aq_ticket *ticket, const struct aq_work *work)
{
	bool limited;
	CUresult result = decide(&limited);

	*ticket = (struct aq_ticket){ 0 };
	int device = limited ? device_to_pay(work) : AQ_NO_DEVICE;
	if (device < 0)
		return result;
	struct payer *payer = payer_of_thread();
	if (__builtin_expect(!payer, 0)) {
		pay_at_once(work);
		return result;
	}
	struct aq_cost_entry *cost = pay(payer, device, work);
	if (wants_sample(&pacers[device], cost))
		*ticket = (struct aq_ticket){ begin_sample(&pacers[device], work, cost), device };
	return result;
}

/* ---- forked children ------------------------------------------------------------------------------------------- */

void aq_pace_forget(void)
{
	atomic_store(&aq_pace_seen, NEVER_FREE);
	atomic_store(&aq_pace_watched, &nothing_to_watch);
	free_given = aq_pace_free_left = 0;
	this_payer = NULL; /* its credit stays the parent's */
	for (unsigned i = 0; i < PAYERS; i++)
		if (atomic_load_explicit(&payers[i].owner, memory_order_relaxed))
			memset(&payers[i], 0, sizeof(payers[i]));
	for (uint32_t i = 0; i < AQ_MAX_DEVICES; i++) {
		aq_latch_init(&pacers[i].gate);
		pacers[i].bucket = NULL;
		pacers[i].mine = NULL;
		for (unsigned j = 0; j < SAMPLES; j++)
			pacers[i].samples[j].state = SAMPLE_EMPTY;
		aq_in_flight_forget(&pacers[i].flight);
		atomic_store(&pacers[i].marked_ns, 0);
		atomic_store(&pacers[i].turn, 0);
		atomic_store(&pacers[i].fetched_turn, 0);
		atomic_store(&pacers[i].wanted.until_ns, 0);
		atomic_store(&pacers[i].wanted.told_ns, 0);
	}
	limits = NULL;
	aq_own_use_forget();
}
