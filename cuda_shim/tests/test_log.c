/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of each kind have a bounded rate, and those not printed are counted: with the test's own clock, then with threads on the real
 * one and stderr in a file. */
#include "log.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support.h"

#define SECOND_NS 1000000000ull
#define THREADS 8
#define LINES_EACH 1000

static unsigned admitted(struct aq_log_rate *rate, uint64_t now_ns, unsigned tried, uint64_t *left_out)
{
	unsigned count = 0;
	uint64_t left;

	*left_out = 0;
	for (unsigned i = 0; i < tried; i++)
		if (aq_log_rate_admits(rate, now_ns, &left)) {
			count++;
			*left_out += left;
		}
	return count;
}

static void flood_is_cut_to_a_burst_then_to_the_rate(void)
{
	struct aq_log_rate rate = { 0 };
	uint64_t now_ns = 100 * SECOND_NS, left_out;

	CHECK(admitted(&rate, now_ns, 5000, &left_out) == AQ_LOG_BURST);
	CHECK(left_out == 0);
	CHECK(admitted(&rate, now_ns + SECOND_NS + 1, 1000, &left_out) == AQ_LOG_PER_SECOND);
	CHECK(left_out == 5000 - AQ_LOG_BURST);
	CHECK(admitted(&rate, now_ns + 60 * SECOND_NS, 1, &left_out) == 1);
	CHECK(left_out == 1000 - AQ_LOG_PER_SECOND);
}

static void silence_fills_the_bucket_and_no_more_than_that(void)
{
	struct aq_log_rate rate = { 0 };
	uint64_t left_out;

	CHECK(admitted(&rate, SECOND_NS, 100, &left_out) == AQ_LOG_BURST);
	CHECK(admitted(&rate, 100000 * SECOND_NS, 100, &left_out) == AQ_LOG_BURST);
}

static void rare_messages_are_always_printed(void)
{
	struct aq_log_rate rate = { 0 };
	uint64_t left_out;

	for (uint64_t second = 0; second < 1000; second++)
		CHECK(admitted(&rate, second * SECOND_NS, AQ_LOG_PER_SECOND, &left_out) == AQ_LOG_PER_SECOND && left_out == 0);
}

static void *flood(void *unused)
{
	for (unsigned i = 0; i < LINES_EACH; i++)
		aq_log_error("a flood of %u", i);
	return unused;
}

/* With stderr in a file: how many of its lines have `text` in them. */
static unsigned lines_with(FILE *file, const char *text)
{
	char line[1024];
	unsigned count = 0;

	rewind(file);
	while (fgets(line, sizeof(line), file)) {
		CHECK(strncmp(line, "aliquot: ", 9) == 0 && line[strlen(line) - 1] == '\n');
		count += strstr(line, text) != NULL;
	}
	return count;
}

static void flood_of_one_kind_hides_no_other_across_threads_and_children(void)
{
	pthread_t threads[THREADS];
	FILE *file = tmpfile();
	int real = dup(STDERR_FILENO), status;

	CHECK(file && real >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, flood, NULL) == 0);
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		aq_log_error("a child's own trouble");
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	aq_log_error("another trouble, %s", "once");
	sleep(1);
	flood(NULL);
	CHECK(dup2(real, STDERR_FILENO) >= 0);
	unsigned said = lines_with(file, "a flood of");
	CHECK(said >= AQ_LOG_BURST && said <= AQ_LOG_BURST + 60 * AQ_LOG_PER_SECOND); /* a minute, on the slowest machine */
	CHECK(lines_with(file, "before this one were not printed)") > 0);
	CHECK(lines_with(file, "another trouble, once") == 1);
	CHECK(lines_with(file, "a child's own trouble") == 1);
	close(real);
	fclose(file);
}

static void long_line_ends_and_still_counts_dropped_lines(void)
{
	char text[2000];
	FILE *file = tmpfile();
	int real = dup(STDERR_FILENO);

	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	CHECK(file && real >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
	for (unsigned i = 0; i < 2 * AQ_LOG_BURST; i++)
		aq_log_error("long: %s", text);
	sleep(1);
	aq_log_error("long: %s", text);
	CHECK(dup2(real, STDERR_FILENO) >= 0);
	unsigned said = lines_with(file, "long: xxx"), told = lines_with(file, "similar lines before this one were not printed)");
	CHECK(said > AQ_LOG_BURST && told >= 1);
	close(real);
	fclose(file);
}

int main(void)
{
	flood_is_cut_to_a_burst_then_to_the_rate();
	silence_fills_the_bucket_and_no_more_than_that();
	rare_messages_are_always_printed();
	flood_of_one_kind_hides_no_other_across_threads_and_children();
	long_line_ends_and_still_counts_dropped_lines();
	return 0;
}
