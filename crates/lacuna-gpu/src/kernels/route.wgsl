// Which experts each token has, and what they weigh: a workgroup for each token. Scores are compared as whole numbers, of
// which the larger is the larger score and equal ones the first's, so how many are better than one is its rank, which no
// order of looking at them changes. What is no number counts as less than all numbers.

struct Params {
    logits: u32,       // word of the first token's
    weights: u32,      // word of the first weight of the first token
    choices: u32,      // word of the first expert of the first token
    tiles: u32,        // word of what workgroups have, if this is the only token, or NONE
    order: u32,        // word of the choices by expert, for the same
    experts: u32,
    used: u32,         // experts of a token
    scores: u32,       // 0: the softmax of all, 1: the sigmoid of each, 2: the softmax of the chosen
    groups: u32,       // from which a few are chosen first
    groups_used: u32,
    sum_of_two: u32,   // 1: groups are compared by the sum of their two largest, 0: by the largest
    normalized: u32,   // 1: weights are divided by their sum
    scale: f32,        // what they are multiplied by
    bias: u32,         // where what is added to scores to compare them begins in `vectors`, or NONE
    expert_scales: u32,  // and what an expert's weights are multiplied by
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;
// The most experts and groups that there may be.
const MOST = 1024u;
const MOST_GROUPS = 64u;
// What `key_of` makes of the least number.
const LEAST_KEY = 0x007fffffu;
// Added to the sum of weights, so that none at all are not divided by nothing.
const LEAST_SUM = 1e-20;

var<workgroup> scores: array<f32, MOST>;
var<workgroup> keys: array<u32, MOST>;
var<workgroup> chosen: array<u32, MOST>;
var<workgroup> group_keys: array<u32, MOST_GROUPS>;

// Larger for a larger number; never zero.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return LEAST_KEY;
    }
    if magnitude == 0u {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn number_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

fn largest_of(thread: u32, x: f32) -> f32 {
    tree[thread] = x;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            tree[thread] = max(tree[thread], tree[thread + half]);
        }
        workgroupBarrier();
    }
    let largest = tree[0];
    workgroupBarrier();
    return largest;
}

// What groups are compared by.
fn group_key(group: u32, size: u32) -> u32 {
    var first = 0u;
    var second = 0u;
    for (var i = group * size; i < (group + 1u) * size; i++) {
        let key = keys[i];
        if key > first {
            second = first;
            first = key;
        } else if key > second {
            second = key;
        }
    }
    if p.sum_of_two == 0u || second == 0u {
        return first;
    }
    return key_of(number_of(first) + number_of(second));
}

@compute @workgroup_size(THREADS)
fn route(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let token = place.x;
    let logits = p.logits + token * p.experts;
    var largest = -3.0e38;
    for (var i = thread; i < p.experts; i += THREADS) {
        let logit = bitcast<f32>(arena[logits + i]);
        scores[i] = logit;
        largest = max(largest, logit);
    }
    if p.scores == 0u {
        largest = largest_of(thread, largest);
        var sum = 0.0;
        for (var i = thread; i < p.experts; i += THREADS) {
            let power = exp(scores[i] - largest);
            scores[i] = power;
            sum += power;
        }
        sum = together(thread, sum);
        for (var i = thread; i < p.experts; i += THREADS) {
            scores[i] /= sum;
        }
    } else if p.scores == 1u {
        for (var i = thread; i < p.experts; i += THREADS) {
            scores[i] = 1.0 / (1.0 + exp(-max(scores[i], -88.0)));
        }
    }
    for (var i = thread; i < p.experts; i += THREADS) {
        var score = scores[i];
        if p.bias != NONE {
            score += vectors[p.bias + i];
        }
        keys[i] = key_of(score);
    }
    workgroupBarrier();
    if p.groups_used < p.groups {
        let size = p.experts / p.groups;
        if thread < p.groups {
            group_keys[thread] = group_key(thread, size);
        }
        workgroupBarrier();
        if thread < p.groups {
            var rank = 0u;
            for (var i = 0u; i < p.groups; i++) {
                let better = group_keys[i] > group_keys[thread];
                rank += select(0u, 1u, better || (group_keys[i] == group_keys[thread] && i < thread));
            }
            if rank >= p.groups_used {
                for (var i = thread * size; i < (thread + 1u) * size; i++) {
                    keys[i] = 0u;
                }
            }
        }
        workgroupBarrier();
    }
    for (var own = thread; own < p.experts; own += THREADS) {
        let key = keys[own];
        var rank = 0u;
        for (var i = 0u; i < p.experts; i++) {
            rank += select(0u, 1u, keys[i] > key || (keys[i] == key && i < own));
        }
        if key > 0u && rank < p.used {
            chosen[rank] = own;
        }
    }
    workgroupBarrier();
    // Few numbers: each thread goes through all of them, in their order.
    var shift = 0.0;
    var divisor = 1.0;
    if p.scores == 2u {
        shift = scores[chosen[0]];
        divisor = 0.0;
        for (var i = 0u; i < p.used; i++) {
            divisor += exp(scores[chosen[i]] - shift);
        }
    }
    var sum = 1.0;
    if p.normalized == 1u {
        sum = LEAST_SUM;
        for (var i = 0u; i < p.used; i++) {
            sum += weight_of(i, shift, divisor);
        }
    }
    for (var i = thread; i < p.used; i += THREADS) {
        let expert = chosen[i];
        var weight = weight_of(i, shift, divisor) / sum * p.scale;
        if p.expert_scales != NONE {
            weight *= vectors[p.expert_scales + expert];
        }
        arena[p.weights + token * p.used + i] = bitcast<u32>(weight);
        arena[p.choices + token * p.used + i] = expert;
        if p.tiles != NONE {
            arena[p.tiles + 4u * i] = expert;
            arena[p.tiles + 4u * i + 1u] = i;
            arena[p.tiles + 4u * i + 2u] = 1u;
            arena[p.order + i] = i;
        }
    }
}

// What the score of one of the chosen experts comes to.
fn weight_of(rank: u32, shift: f32, divisor: f32) -> f32 {
    let score = scores[chosen[rank]];
    if p.scores == 2u {
        return exp(score - shift) / divisor;
    }
    return score;
}
