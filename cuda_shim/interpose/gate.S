/* SPDX-License-Identifier: Apache-2.0 */
/* See gate.h. A gate is aq_unpaced() of unpaced.h and a jump, in one cache line. It touches no argument of the call and puts nothing on the
 * stack. The driver sees the arguments as the program passed them, and returns to the program. */

#if defined(__x86_64__)

.macro CODE name
	endbr64
	mov aq_unpaced_watched(%rip), %rax
	mov (%rax), %rax
	cmp aq_unpaced_seen(%rip), %rax
	jne aq_paced_\name
	mov aq_gate_\name(%rip), %r11
	mov aq_unpaced_left@gottpoff(%rip), %rax
	decq %fs:(%rax)
	lea aq_paced_\name(%rip), %rax
	cmovs %rax, %r11 /* a third branch in the line would cost more */
	jmp *%r11
.endm
#define FUNCTION @function
#define OBJECT @object

#elif defined(__aarch64__)

.macro CODE name
	hint #34 /* bti c */
	adrp x16, aq_unpaced_watched
	ldr x16, [x16, :lo12:aq_unpaced_watched]
	ldr x16, [x16]
	adrp x17, aq_unpaced_seen
	ldr x17, [x17, :lo12:aq_unpaced_seen]
	cmp x16, x17
	b.ne 1f
	adrp x17, :gottprel:aq_unpaced_left
	ldr x17, [x17, :gottprel_lo12:aq_unpaced_left]
	mrs x16, tpidr_el0
	ldr x9, [x16, x17]
	subs x9, x9, #1
	str x9, [x16, x17]
	b.mi 1f
	adrp x16, aq_gate_\name
	ldr x16, [x16, :lo12:aq_gate_\name]
	br x16
1:	b aq_paced_\name
.endm
#define FUNCTION %function
#define OBJECT %object

#else
#error "the gates know x86-64 and aarch64, the machines CUDA runs on"
#endif

.macro GATE name
	.text
	.globl \name
	.type \name, FUNCTION
	.p2align 6 /* within a line */
\name:
	.cfi_startproc
	CODE \name
	.cfi_endproc
	.size \name, . - \name

	.data
	.globl aq_gate_\name
	.hidden aq_gate_\name
	.type aq_gate_\name, OBJECT
	.p2align 3
aq_gate_\name:
	.8byte aq_paced_\name
	.size aq_gate_\name, 8
.endm

	GATE cuLaunchKernel
	GATE cuLaunchKernel_ptsz
	GATE cuLaunchCooperativeKernel
	GATE cuLaunchCooperativeKernel_ptsz

	.section .note.GNU-stack, "", %progbits
