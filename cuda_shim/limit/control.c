#include "limit/control.h"

#define SMOOTHING_NUM 3 /* EMA weight of a new measurement: 3/10 */
#define SMOOTHING_DEN 10
#define MOST_PERIODS (AQ_CONTROL_UNHELD_NS / AQ_CONTROL_PERIOD_NS) /* that one measurement counts for */
#define INTEGRAL_GAIN_DEN 10  /* the integral moves by a tenth of the relative error per period */
#define INTEGRAL_MIN_Q16 (-(int32_t)(AQ_GAIN_ONE * 9 / 10))
#define INTEGRAL_MAX_Q16 ((int32_t)(AQ_GAIN_MAX - AQ_GAIN_ONE))

void aq_control_interrupted(struct aq_bucket *bucket)
{
	if (atomic_load_explicit(&bucket->regime, memory_order_relaxed))
		atomic_store_explicit(&bucket->regime, 0, memory_order_relaxed);
}

uint32_t aq_control_take_lease(struct aq_bucket *bucket, int64_t now_ns, bool is_held)
{
	int64_t until = atomic_load_explicit(&bucket->lease_until_ns, memory_order_relaxed);
	int64_t left = (int64_t)((uint64_t)until - (uint64_t)now_ns), since = (int64_t)((uint64_t)now_ns - (uint64_t)until);

	/* A lease far in the future was scribbled there; it must not end the correction for good. */
	if (left > (is_held ? 0 : AQ_CONTROL_PERIOD_NS - AQ_CONTROL_UNHELD_NS) && left <= AQ_CONTROL_PERIOD_NS)
		return 0;
	if (!atomic_compare_exchange_strong_explicit(&bucket->lease_until_ns, &until, now_ns + AQ_CONTROL_PERIOD_NS,
						     memory_order_relaxed, memory_order_relaxed))
		return 0;
	if (since > AQ_CONTROL_GAP_NS || since < 0) {
		aq_control_interrupted(bucket);
		return 1;
	}
	return 1 + (uint32_t)(since < AQ_CONTROL_UNHELD_NS - AQ_CONTROL_PERIOD_NS ? since / AQ_CONTROL_PERIOD_NS : MOST_PERIODS - 1);
}

static uint32_t smooth(struct aq_bucket *bucket, uint32_t measured_q16)
{
	uint32_t old = atomic_load_explicit(&bucket->measured_q16, memory_order_relaxed);
	int64_t step = ((int64_t)measured_q16 - old) * SMOOTHING_NUM / SMOOTHING_DEN;
	uint32_t smoothed = old ? (uint32_t)(old + step) : measured_q16;
	atomic_store_explicit(&bucket->measured_q16, smoothed, memory_order_relaxed);
	return smoothed;
}

static bool is_far(uint32_t a, uint32_t b)
{
	return a > 2 * b || b > 2 * a;
}

/* For how many periods, with those of this measurement, it is still told what was before this ceiling. */
static uint32_t stale_periods(struct aq_bucket *bucket, uint32_t percent, uint32_t periods)
{
	uint32_t regime = atomic_load_explicit(&bucket->regime, memory_order_relaxed);
	uint32_t stale = is_far(regime & 0xff, percent) ? AQ_CONTROL_STALE : regime >> 8;

	if (stale > AQ_CONTROL_STALE)
		stale = AQ_CONTROL_STALE;
	atomic_store_explicit(&bucket->regime, (stale > periods ? stale - periods : 0) << 8 | percent, memory_order_relaxed);
	return stale;
}

void aq_control_correct(struct aq_bucket *bucket, int64_t now_ns, uint32_t periods, uint32_t percent, uint32_t measured_q16)
{
	if (percent == 0 || percent > 100)
		return;
	if (stale_periods(bucket, percent, periods)) {
		atomic_store_explicit(&bucket->measured_q16, 0, memory_order_relaxed);
		return;
	}
	uint32_t smoothed = smooth(bucket, measured_q16);
	int64_t starved = atomic_load_explicit(&bucket->starved_at_ns, memory_order_relaxed);
	int64_t limit_q16 = (int64_t)AQ_GAIN_ONE * percent / 100;
	if ((uint64_t)now_ns - (uint64_t)starved > AQ_CONTROL_PERIOD_NS && smoothed <= limit_q16)
		return;
	int64_t error_q16 = (limit_q16 - smoothed) * (int64_t)AQ_GAIN_ONE / limit_q16;
	if (error_q16 < -(int64_t)AQ_GAIN_ONE)
		error_q16 = -(int64_t)AQ_GAIN_ONE;
	int64_t integral = atomic_load_explicit(&bucket->integral_q16, memory_order_relaxed) + error_q16 * periods / INTEGRAL_GAIN_DEN;
	if (integral < INTEGRAL_MIN_Q16)
		integral = INTEGRAL_MIN_Q16;
	if (integral > INTEGRAL_MAX_Q16)
		integral = INTEGRAL_MAX_Q16;
	atomic_store_explicit(&bucket->integral_q16, (int32_t)integral, memory_order_relaxed);
	atomic_store_explicit(&bucket->gain_q16, (uint32_t)((int64_t)AQ_GAIN_ONE + integral), memory_order_relaxed);
}
