/* SPDX-License-Identifier: Apache-2.0 */
/* What sudo does, as far as a driver can see it: a setuid file that becomes root for good, forgets the caller's environment, and starts a
 * program. What stays of the environment are the names of the simulated hardware, which on a real node are device files. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char hardware[] = "ALIQUOT_SIM_";

int main(int argc, char **argv, char **environment)
{
	char *kept[64] = { "PATH=/bin" };
	int count = 1;
	for (char **entry = environment; *entry && count < 63; entry++)
		if (strncmp(*entry, hardware, sizeof hardware - 1) == 0)
			kept[count++] = *entry;
	if (argc < 2 || setresgid(0, 0, 0) != 0 || setresuid(0, 0, 0) != 0) {
		perror("become_root");
		return 1;
	}
	execve(argv[1], argv + 1, kept);
	perror(argv[1]);
	return 1;
}
