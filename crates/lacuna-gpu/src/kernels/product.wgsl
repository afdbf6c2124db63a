// The kernel for a few tokens: eight rows of the matrix to a workgroup, two to the 32 threads of a lane each, for up to
// eight tokens at once.

const THREADS = 128u;
const ROWS = 8u;
const TOKENS = 8u;
// The sums of a row and token, one behind the other, and one more, so that they lie in different banks.
const PARTIAL = 33u;

var<workgroup> partial: array<f32, 2112>;

// Of up to four rows.
fn add_rows(sums: vec4<f32>, unit: Unit, number: u32, inputs: vec4<u32>, count: u32) -> vec4<f32> {
    var all = sums;
    all.x = add(all.x, unit, input_of(inputs.x, number));
    if count > 1u {
        all.y = add(all.y, unit, input_of(inputs.y, number));
    }
    if count > 2u {
        all.z = add(all.z, unit, input_of(inputs.z, number));
    }
    if count > 3u {
        all.w = add(all.w, unit, input_of(inputs.w, number));
    }
    return all;
}

fn keep(row: u32, token: u32, lane: u32, sums: vec4<f32>) {
    let at = (row * TOKENS + token) * PARTIAL + lane;
    partial[at] = sums.x;
    partial[at + PARTIAL] = sums.y;
    partial[at + 2u * PARTIAL] = sums.z;
    partial[at + 3u * PARTIAL] = sums.w;
}

@compute @workgroup_size(THREADS)
fn product(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let lane = thread % LANES;
    let pair = thread / LANES * 2u;
    let own_share = share(group.y, TOKENS);
    let first = own_share.x;
    let count = own_share.y;
    if count == 0u {
        return;
    }
    begin(thread);
    let inputs = input_rows(first, count);
    // Of a last group that is not full, the last row again.
    let row = group.x * ROWS + pair;
    let one = place_of(min(row, p.count - 1u));
    let other = place_of(min(row + 1u, p.count - 1u));
    var ones = vec4<f32>();
    var others = vec4<f32>();
    var more_ones = vec4<f32>();
    var more_others = vec4<f32>();
    if count == 1u {
        // Two units of a lane at a time, so that more of the matrix is under way at once.
        var number = lane;
        for (; number + LANES < p.units; number += 2u * LANES) {
            let unit = load(one, number);
            let second = load(other, number);
            let next = load(one, number + LANES);
            let next_second = load(other, number + LANES);
            let input = input_of(inputs.x, number);
            let next_input = input_of(inputs.x, number + LANES);
            ones.x = add(add(ones.x, unit, input), next, next_input);
            others.x = add(add(others.x, second, input), next_second, next_input);
        }
        if number < p.units {
            let unit = load(one, number);
            let second = load(other, number);
            let input = input_of(inputs.x, number);
            ones.x = add(ones.x, unit, input);
            others.x = add(others.x, second, input);
        }
    } else if count <= 4u {
        for (var number = lane; number < p.units; number += LANES) {
            let unit = load(one, number);
            let second = load(other, number);
            ones = add_rows(ones, unit, number, inputs, count);
            others = add_rows(others, second, number, inputs, count);
        }
    } else {
        let more_inputs = input_rows(first + 4u, count - 4u);
        for (var number = lane; number < p.units; number += LANES) {
            let unit = load(one, number);
            let second = load(other, number);
            ones = add_rows(ones, unit, number, inputs, count);
            others = add_rows(others, second, number, inputs, count);
            more_ones = add_rows(more_ones, unit, number, more_inputs, count - 4u);
            more_others = add_rows(more_others, second, number, more_inputs, count - 4u);
        }
    }
    keep(pair, 0u, lane, ones);
    keep(pair + 1u, 0u, lane, others);
    if count > 4u {
        keep(pair, 4u, lane, more_ones);
        keep(pair + 1u, 4u, lane, more_others);
    }
    workgroupBarrier();
    // A thread for each row and token: rows side by side.
    let own = group.x * ROWS + thread % ROWS;
    let token = thread / ROWS;
    if own < p.count && token < count {
        let at = (thread % ROWS * TOKENS + token) * PARTIAL;
        var sum = 0.0;
        for (var other_lane = 0u; other_lane < LANES; other_lane++) {
            sum += partial[at + other_lane];
        }
        leave(output_row(first + token), own, sum);
    }
}
