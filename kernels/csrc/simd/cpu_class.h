/* How the functions of an instruction class are named. setup.py compiles the kernels once for each class, with the
 * class's flags and with its name as CPU_CLASS. cpu.c knows the classes. kernels/native.py picks one when it loads the
 * library. */
#pragma once

#define JOIN_(name, class) name##_##class
#define JOIN(name, class) JOIN_(name, class)
/* FOR_CLASS(rms_norm) is rms_norm_avx2 in the class avx2. */
#define FOR_CLASS(name) JOIN(name, CPU_CLASS)
