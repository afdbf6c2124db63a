//! What files say of mixtures of experts, which families vary.

use super::Facts;
use super::facts::{Key, PerLayer};
use crate::error::ConfigError;
use crate::spec::{
    Activation, ExpertBlock, Experts, FeedForward, Gating, GroupScore, Groups, ModelSpec, Router,
    Routing, Scores, SharedExpert,
};

/// Experts of a layer.
pub(crate) const COUNT: Key = Key::new(
    "expert_count",
    "num_experts|num_local_experts|n_routed_experts|moe_num_experts",
);

/// Elements inside an expert.
pub(crate) const INNER: Key = Key::new(
    "expert_feed_forward_length",
    "moe_intermediate_size|expert_intermediate_size",
);

/// How GGUF says what scores are made of logits by, in `expert_gating_func`.
pub(crate) mod gating {
    use crate::families::facts::Key;

    pub(crate) const KEY: Key = Key::gguf("expert_gating_func");
    pub(crate) const SOFTMAX: usize = 1;
    pub(crate) const SIGMOID: usize = 2;
}

/// What a file says where a family does not know better: weights are a softmax over all experts, made to
/// sum to 1. `spec` is that of a dense model.
pub(crate) fn experts(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<Experts, ConfigError> {
    let used = Key::new(
        "expert_used_count",
        "num_experts_per_tok|experts_per_token|top_k_experts|moe_k",
    );
    // Files whose layers are all sparse may say the width of experts as that of feed-forward blocks.
    let dense = spec.layers.first_mut();
    let dense = dense.and_then(|layer| layer.feed_forward.gated_mut());
    Ok(Experts {
        routing: Routing {
            experts: facts.required(COUNT)?,
            used: facts.required(used)?,
            scores: Scores::Softmax,
            groups: None,
            normalized: true,
            scale: 1.0,
        },
        router: Router::default(),
        inner: match (facts.get(INNER)?, &dense) {
            (Some(inner), _) => inner,
            (None, dense) => dense.as_ref().map_or(0, |block| block.inner),
        },
        block: ExpertBlock::Gated(Gating::Product(
            dense.map_or(Activation::Silu, |block| block.activation),
        )),
        latent: None,
        biases: false,
        shared: None,
        dense: None,
    })
}

/// Experts scored by sigmoids, with a bias for choosing only, and a block that all tokens have.
pub(crate) fn sigmoid_experts(
    facts: &Facts<'_>,
    spec: &mut ModelSpec,
) -> Result<Experts, ConfigError> {
    facts.expect(
        gating::KEY,
        gating::SIGMOID,
        "experts scored by sigmoids are",
    )?;
    let mut experts = experts(facts, spec)?;
    let routing = &mut experts.routing;
    routing.scores = Scores::Sigmoid;
    routing.normalized = normalized(facts, true)?;
    routing.scale = scale(facts)?;
    experts.router.selection_bias = true;
    experts.shared = shared(facts, experts.inner, false)?;
    Ok(experts)
}

/// What the sum of the chosen experts is multiplied by.
pub(crate) fn scale(facts: &Facts<'_>) -> Result<f32, ConfigError> {
    let key = Key::new(
        "expert_weights_scale",
        "routed_scaling_factor|route_scale|router_scaling_factor|moe_routed_scaling_factor",
    );
    Ok(facts.get(key)?.unwrap_or(1.0))
}

/// The groups that experts are chosen in, best groups first, by `score`; `None` where that is one.
pub(crate) fn groups(facts: &Facts<'_>, score: GroupScore) -> Result<Option<Groups>, ConfigError> {
    let count: Option<usize> = facts.get(Key::new("expert_group_count", "n_group"))?;
    let used: Option<usize> = facts.get(Key::new("expert_group_used_count", "topk_group"))?;
    // All of one group are what all are.
    let count = count.filter(|count| *count != 1);
    Ok(count.map(|count| Groups {
        count,
        used: used.unwrap_or(count),
        score,
    }))
}

/// Whether a token's weights are made to sum to 1, where files say it; `otherwise` where they do not.
pub(crate) fn normalized(facts: &Facts<'_>, otherwise: bool) -> Result<bool, ConfigError> {
    let said = facts.get(Key::new("expert_weights_norm", "norm_topk_prob|route_norm"))?;
    Ok(said.unwrap_or(otherwise))
}

/// The block that all tokens have, of the width that the file says or else of so many experts.
pub(crate) fn shared(
    facts: &Facts<'_>,
    inner: usize,
    gated: bool,
) -> Result<Option<SharedExpert>, ConfigError> {
    let width: Option<usize> = facts.get(Key::new(
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size|shared_intermediate_size|moe_shared_expert_intermediate_size",
    ))?;
    let count: Option<usize> = facts.get(Key::new(
        "expert_shared_count",
        "n_shared_experts|num_shared_experts|moe_num_shared_experts",
    ))?;
    let width = match (width, count) {
        (Some(width), _) => width,
        (None, count) => inner.saturating_mul(count.unwrap_or(0)),
    };
    let shared = SharedExpert {
        inner: width,
        gated,
    };
    Ok((width > 0).then_some(shared))
}

/// Whether each of so many layers has experts, where a folder lists it.
pub(crate) fn sparse_layers(
    facts: &Facts<'_>,
    layers: usize,
) -> Result<Option<Vec<bool>>, ConfigError> {
    let field = "mlp_layer_types";
    let Some(types) = facts.get::<Vec<String>>(Key::huggingface(field))? else {
        return Ok(None);
    };
    let sparse = types.iter().map(|kind| match kind.as_str() {
        "sparse" => Ok(true),
        "dense" => Ok(false),
        other => Err(ConfigError::Unsupported {
            feature: format!("a feed-forward block of type `{other}`"),
            supported: "dense and sparse ones are",
        }),
    });
    let sparse = PerLayer::Each(sparse.collect::<Result<_, _>>()?);
    sparse.of(layers, field).map(Some)
}

/// Gives `experts` to the layers of which `sparse` says so.
pub(crate) fn give_experts(spec: &mut ModelSpec, experts: Experts, sparse: impl Fn(usize) -> bool) {
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if sparse(index) {
            layer.feed_forward = FeedForward::Experts(experts);
        }
    }
}
