// Functions of expressions, with the results of NumPy's: each takes arguments of the dtype in which NumPy computes.
//
// Spliced in by field_body.cu. Products are not part of fused multiply-adds, so that sums and products have NumPy's bits.
//
// The text of a call (expression_kernels.py) is three definitions. INPUTS(X) is X(number, type) for each input of a cell:
// a Field, Pointer or Index. STEPS computes the expressions from the cell `in`. RESULTS_OF(X) is
// X(number, operation, accumulator, finish, value) for each result.

namespace numpy {

template <class T>
struct To {
    template <class F>
    static __device__ __forceinline__ T of(F a) { return T(a); }
};
template <class T>
struct To<Complex<T>> {
    template <class F>
    static __device__ __forceinline__ Complex<T> of(F a) { return {T(a), T(0)}; }
    template <class F>
    static __device__ __forceinline__ Complex<T> of(Complex<F> a) { return {T(a.real), T(a.imag)}; }
};

// A value from the bits of one operand, which is least-significant first, or of two.
template <class T>
__device__ __forceinline__ T of_bits(u64 bits) { return *(T*)&bits; }
template <class T>
__device__ __forceinline__ T of_bits(u64 real, u64 imag) { return {of_bits<double>(real), of_bits<double>(imag)}; }

#define FN template <class T> __device__ __forceinline__
FN T add(T a, T b) { return Sum::of(a, b); }
FN T multiply(T a, T b) { return Prod::of(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
FN Complex<T> multiply(Complex<T> a, Complex<T> b)
{
    return {multiply(a.real, b.real) - multiply(a.imag, b.imag), multiply(a.real, b.imag) + multiply(a.imag, b.real)};
}
FN T negative(T a)
{
    if constexpr (is_whole<T>)
        return T(0 - u64(a));
    else
        return -a;
}
FN Complex<T> negative(Complex<T> a) { return {-a.real, -a.imag}; }
FN T subtract(T a, T b)
{
    if constexpr (is_whole<T>)
        return T(u64(a) - u64(b));
    else
        return a - b;
}
FN Complex<T> subtract(Complex<T> a, Complex<T> b) { return {a.real - b.real, a.imag - b.imag}; }
FN T divide(T a, T b) { return a / b; }
// R. L. Smith: Algorithm 116, Complex division, Communications of the ACM 5 (1962); as NumPy.
FN Complex<T> divide(Complex<T> a, Complex<T> b)
{
    const bool is_real = fabs(b.real) >= fabs(b.imag);
    const T large = is_real ? b.real : b.imag, small = is_real ? b.imag : b.real;
    const T x = is_real ? a.real : a.imag, y = is_real ? a.imag : a.real;
    const T ratio = small / large, scale = T(1) / (large + multiply(small, ratio));
    const T real = multiply(x + multiply(y, ratio), scale), imag = multiply(y - multiply(x, ratio), scale);
    return large == 0 ? Complex<T>{a.real / T(fabs(large)), a.imag / T(fabs(large))} : Complex<T>{real, is_real ? imag : -imag};
}
FN T remainder(T a, T b)
{
    if constexpr (is_whole<T>) {
        if (b == 0 || (T(-1) < 0 && b == T(-1)))
            return 0;
        const T rest = a % b;
        return rest && (rest < 0) != (b < 0) ? T(rest + b) : rest;
    } else {
        const T rest = fmod(a, b);
        if (b == 0)
            return rest;
        return rest == 0 ? copysign(T(0), b) : (rest < 0) != (b < 0) ? rest + b : rest;
    }
}
FN T floor_divide(T a, T b)
{
    if constexpr (is_whole<T>) {
        if (b == 0)
            return 0;
        if (T(-1) < 0 && b == T(-1))
            return negative(a);
        return T(a / b - (a % b && (a < 0) != (b < 0)));
    } else {
        const T rest = fmod(a, b);
        if (b == 0)
            return a / b;
        const T quotient = (a - rest) / b - (rest != 0 && (rest < 0) != (b < 0) ? T(1) : T(0));
        if (quotient == 0)
            return copysign(T(0), a / b);
        const T whole = floor(quotient);
        return quotient - whole > T(0.5) ? whole + 1 : whole;
    }
}
FN T power(T a, T b)
{
    if constexpr (is_whole<T>) {
        u64 base = u64(a), result = 1;
        for (u64 n = u64(b); n; n >>= 1, base *= base)
            if (n & 1)
                result *= base;
        return T(result);
    } else
        return pow(a, b);
}
FN T square(T a) { return multiply(a, a); }
FN T positive(T a) { return a; }
FN T absolute(T a)
{
    if constexpr (is_whole<T>)
        return a < 0 ? T(0 - u64(a)) : a;
    else
        return fabs(a);
}
FN T absolute(Complex<T> a) { return hypot(a.real, a.imag); }
FN T sqrt(T a) { return ::sqrt(a); }
FN T exp(T a) { return ::exp(a); }
FN T log(T a) { return ::log(a); }
FN T sin(T a) { return ::sin(a); }
FN T cos(T a) { return ::cos(a); }
FN T minimum(T a, T b) { return Min::of(a, b); }
FN T maximum(T a, T b) { return Max::of(a, b); }
FN T where(bool condition, T a, T b) { return condition ? a : b; }
FN T real(Complex<T> a) { return a.real; }
FN T imag(Complex<T> a) { return a.imag; }
FN Complex<T> conjugate(Complex<T> a) { return {a.real, -a.imag}; }
FN bool isfinite(T a) { return is_whole<T> || a - a == 0; }
FN bool isfinite(Complex<T> a) { return isfinite(a.real) && isfinite(a.imag); }
FN bool equal(T a, T b) { return a == b; }
FN bool equal(Complex<T> a, Complex<T> b) { return a.real == b.real && a.imag == b.imag; }
FN bool not_equal(T a, T b) { return !equal(a, b); }
FN bool less(T a, T b) { return a < b; }
FN bool less_equal(T a, T b) { return a <= b; }
// NumPy compares 64-bit integers of unlike signs exactly.
__device__ __forceinline__ bool less(i64 a, u64 b) { return a < 0 || u64(a) < b; }
__device__ __forceinline__ bool less(u64 a, i64 b) { return b >= 0 && a < u64(b); }
__device__ __forceinline__ bool less_equal(i64 a, u64 b) { return !less(b, a); }
__device__ __forceinline__ bool less_equal(u64 a, i64 b) { return !less(b, a); }
__device__ __forceinline__ bool equal(i64 a, u64 b) { return a >= 0 && u64(a) == b; }
__device__ __forceinline__ bool equal(u64 a, i64 b) { return equal(b, a); }
template <class A, class B>
__device__ __forceinline__ bool not_equal(A a, B b) { return !equal(a, b); }
template <class A, class B>
__device__ __forceinline__ bool greater(A a, B b) { return less(b, a); }
template <class A, class B>
__device__ __forceinline__ bool greater_equal(A a, B b) { return less_equal(b, a); }
FN T bitwise_and(T a, T b) { return a && b; }
FN T bitwise_or(T a, T b) { return a || b; }
FN T invert(T a) { return !a; }
#undef FN

// Squares of absolute values, in double.
template <class T>
__device__ __forceinline__ double norm2(T a) { return double(a) * double(a); }
template <class T>
__device__ __forceinline__ double norm2(Complex<T> a) { return norm2(a.real) + norm2(a.imag); }

template <class T>
struct Stored { typedef T type; };
template <>
struct Stored<bool> { typedef unsigned char type; };

// A cell of a field, whose strides have the number `set`.
template <class T, u32 set>
struct Field {
    T value;
    __device__ __forceinline__ void load(u64 operand, const i64* offset)
    {
        value = T(*at_address<const typename Stored<T>::type>(operand + offset[set]));
    }
};

// An array of shape (), the same for all cells.
template <class T>
struct Pointer {
    T value;
    __device__ __forceinline__ void load(u64 operand, const i64*)
    {
        value = T(*at_address<const typename Stored<T>::type>(operand));
    }
};

// The index along an axis.
template <u32 set>
struct Index {
    i64 value;
    __device__ __forceinline__ void load(u64 operand, const i64* offset) { value = i64(operand) + offset[set]; }
};

}

#define DECLARE_INPUT(number, ...) __VA_ARGS__ v##number;
#define LOAD_INPUT(number, ...) v##number.load(cells.operand[number], offset);

// An accumulator for each result, the functions of which are those of allreduce_field.cu.
#define DECLARE_TOTAL(number, Op, T, Finish, ...) T r##number;
#define BEGIN_TOTAL(number, Op, T, Finish, ...) all.r##number = identity<T>(partials, number);
#define TAKE_VALUE(number, Op, T, Finish, ...) take_in<Op, T>(all.r##number, __VA_ARGS__);
#define MERGE_TOTAL(number, Op, T, Finish, ...) take_in<Op, T>(all.r##number, other.r##number);
#define STORE_TOTAL(number, Op, T, Finish, ...) \
    *at_address<T>(number ? cells.operand[OPERANDS - RESULTS + number] : p.target) = Finish::of(all.r##number);
#define VALUE_OF(number, Op, T, Finish, ...) (__VA_ARGS__)
