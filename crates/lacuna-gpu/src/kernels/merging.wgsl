// What attention has made of some rows: the largest score, the sum of e^(score - largest), and four elements of
// the sum of values so weighed.
struct Partial {
    largest: f32,
    sum: f32,
    weighed: vec4<f32>,
}

// Nothing: below every score that is finite.
const NOTHING = Partial(-3.0e38, 0.0, vec4<f32>());

// What it is with the rows that follow.
fn join(before: Partial, next: Partial) -> Partial {
    let largest = max(before.largest, next.largest);
    let kept = exp(before.largest - largest);
    let gained = exp(next.largest - largest);
    return Partial(
        largest,
        fma(before.sum, kept, next.sum * gained),
        fma(before.weighed, vec4<f32>(kept), next.weighed * gained),
    );
}
