//! Latent attention, in the absorbed form: `hidden += W_o values`.
//!
//! ```text
//! project   the latent row c | r of each token; queries q | s of each head
//! rotate    c is normed; r and s are turned by position
//! absorb    K_h^T q
//! join      queries of latent rows: K_h^T q | s
//! attend    c | r is stored; attention over c | r, whose values are c
//! sort      what heads have attended to, head by head
//! values    V_h times that
//! merge     ... token by token
//! ```

use lacuna_kernels::{ExpertInput, HeadRows, Routing};

use super::Stream;
use super::attention::required_if;
use crate::program::{Bias, Builder, Op, Rows, Slot};
use crate::spec::{Attention, Latent, LayerSpec};

/// Matrices that heads have of their own, as experts that every token has.
struct OfHeads {
    routing: Routing,
    routes: Slot,
}

/// Queries of heads, before they are queries of latent rows.
#[derive(Clone, Copy)]
struct Queries {
    /// What positions do not turn, `[heads, tokens, key_dim]`.
    plain: Slot,
    /// What they have turned, `[tokens, heads, elements that turn]`.
    turned: Slot,
}

impl Stream<'_> {
    /// Returns what the layer's input was normed to, if it was.
    pub(super) fn latent_attention(
        &self,
        index: usize,
        layer: &LayerSpec,
        attention: &Attention,
        latent: Latent,
        program: &mut Builder,
    ) -> Option<Slot> {
        let (query, row, input) = self.project_latent(layer, attention, latent, program);
        let parts = self.rotate_latent(attention, latent, [query, row], program);
        let routing = Routing::all(attention.query_heads);
        program.step("absorb");
        let heads = OfHeads {
            routes: program.routes(routing),
            routing,
        };
        program.push(Op::RouteToAll {
            routing,
            routes: heads.routes,
        });
        let queries = self.absorb(attention, latent, &heads, parts, program);

        program.step("attend");
        program.push(Op::Store {
            layer: index,
            keys: row,
            values: None,
            width: attention.head_dim,
        });
        let attended = program.values("attended", Rows::Tokens, attention.attended_width());
        let shape = attention.shape();
        let states = program.attention_states(shape);
        program.push(Op::Attend {
            layer: index,
            shape,
            queries,
            output: attended,
            states,
            sinks: None,
        });
        let values = self.latent_values(attention, latent, &heads, attended, program);
        let width = attention.query_heads * latent.value_dim;
        self.attention_output(layer, attention, (values, width), program);
        input
    }

    /// Queries of all heads, latent rows, and what the layer's input was normed to.
    fn project_latent(
        &self,
        layer: &LayerSpec,
        attention: &Attention,
        latent: Latent,
        program: &mut Builder,
    ) -> (Slot, Slot, Option<Slot>) {
        let hidden = self.spec.hidden;
        let queries = attention.query_heads * latent.query_dim(attention);
        let bias = required_if(attention.biases.projections);
        program.step("project");
        let input = layer.norms.before_attention().then(|| {
            let input = program.values("attention-input", Rows::Tokens, hidden);
            let weight = program.vector("attn_norm", hidden);
            self.norm(weight, self.hidden, input, Rows::Tokens, program);
            input
        });
        let read = input.unwrap_or(self.hidden);
        let row = program.values("latent-row", Rows::Tokens, attention.head_dim);
        let matrix = program.matrix("attn_kv_a_mqa", attention.head_dim, hidden, bias);
        let query = program.values("query", Rows::Tokens, queries);
        let (first, width) = match latent.query_rank {
            None => (("attn_q", query), queries),
            Some(rank) => {
                let narrow = program.values("query-latent", Rows::Tokens, rank);
                (("attn_q_a", narrow), rank)
            }
        };
        let outputs = vec![
            (program.matrix(first.0, width, hidden, bias), first.1),
            (matrix, row),
        ];
        let blocks = "attention-input-blocks";
        program.product(read, blocks, Rows::Tokens, hidden, outputs);
        if let Some(rank) = latent.query_rank {
            let weight = program.vector("attn_q_a_norm", rank);
            program.push(Op::Norm {
                norm: Latent::NORM,
                weight: Some(weight),
                input: first.1,
                output: first.1,
                rows: Rows::Tokens,
                groups: 1,
                width: rank,
            });
            let matrix = program.matrix("attn_q_b", queries, rank, Bias::IfPresent);
            let blocks = "query-latent-blocks";
            program.product(first.1, blocks, Rows::Tokens, rank, vec![(matrix, query)]);
        }
        (query, row, input)
    }

    /// Norms latent rows and turns what positions turn, where it is; takes queries apart in what they do
    /// not turn, by head, and what they turn.
    fn rotate_latent(
        &self,
        attention: &Attention,
        latent: Latent,
        [query, row]: [Slot; 2],
        program: &mut Builder,
    ) -> Queries {
        let (rank, heads) = (latent.rank, attention.query_heads);
        let dimensions = attention.head_dim - rank;
        program.step("rotate");
        let normed = program.values("latent-normed", Rows::Tokens, rank);
        let whole = |start| (row, HeadRows::by_token(attention.head_dim, start));
        let part = (normed, HeadRows::by_token(rank, 0));
        program.columns(whole(0), part, 1, rank);
        let weight = program.vector("attn_kv_a_norm", rank);
        program.push(Op::Norm {
            norm: Latent::NORM,
            weight: Some(weight),
            input: normed,
            output: normed,
            rows: Rows::Tokens,
            groups: 1,
            width: rank,
        });
        program.columns_beside(part, whole(0), 1, rank);

        let key = program.values("key-turned", Rows::Tokens, dimensions);
        let turned = (key, HeadRows::by_token(dimensions, 0));
        program.columns(whole(rank), turned, 1, dimensions);
        self.turn(attention, (key, 1), dimensions, program);
        program.columns_beside(turned, whole(rank), 1, dimensions);

        let Latent { key_dim, .. } = latent;
        let query = |start| (query, HeadRows::by_token(key_dim + dimensions, start));
        let plain = program.values("query-plain", Rows::Tokens, heads * key_dim);
        let to = HeadRows::by_head(key_dim, 0);
        program.columns(query(0), (plain, to), heads, key_dim);
        let turned = program.values("query-turned", Rows::Tokens, heads * dimensions);
        let to = HeadRows::by_token(dimensions, 0);
        program.columns(query(key_dim), (turned, to), heads, dimensions);
        self.turn(attention, (turned, heads), dimensions, program);
        Queries { plain, turned }
    }

    fn turn(
        &self,
        attention: &Attention,
        (heads_of, heads): (Slot, usize),
        dimensions: usize,
        program: &mut Builder,
    ) {
        let rope = attention.rope.expect("latent rows have a part that turns");
        program.push(Op::Rotate {
            heads_of,
            table: self.rotations[rope],
            heads,
            head_dim: dimensions,
            dimensions,
            style: self.spec.ropes[rope].style,
        });
    }

    /// Queries of latent rows, `[tokens, heads, head_dim]`.
    fn absorb(
        &self,
        attention: &Attention,
        latent: Latent,
        of_heads: &OfHeads,
        Queries { plain, turned }: Queries,
        program: &mut Builder,
    ) -> Slot {
        let Latent { rank, key_dim, .. } = latent;
        let (heads, head_dim) = (attention.query_heads, attention.head_dim);
        let absorbed = program.values("query-absorbed", Rows::Tokens, heads * rank);
        let from = (plain, key_dim, "query-plain-blocks");
        of_heads.product("attn_k_b", from, (absorbed, rank), program);

        program.step("join");
        let joined = program.values("latent-query", Rows::Tokens, heads * head_dim);
        let at = |start| (joined, HeadRows::by_token(head_dim, start));
        let from = (absorbed, HeadRows::by_head(rank, 0));
        program.columns(from, at(0), heads, rank);
        let dimensions = head_dim - rank;
        let from = (turned, HeadRows::by_token(dimensions, 0));
        program.columns_beside(from, at(rank), heads, dimensions);
        joined
    }

    /// Values of all heads, `[tokens, heads, value_dim]`.
    fn latent_values(
        &self,
        attention: &Attention,
        latent: Latent,
        of_heads: &OfHeads,
        attended: Slot,
        program: &mut Builder,
    ) -> Slot {
        let Latent {
            rank, value_dim, ..
        } = latent;
        let heads = attention.query_heads;
        program.step("sort");
        let sorted = program.values("attended-by-head", Rows::Tokens, heads * rank);
        let from = (attended, HeadRows::by_token(rank, 0));
        program.columns(from, (sorted, HeadRows::by_head(rank, 0)), heads, rank);
        program.step("values");
        let made = program.values("values-by-head", Rows::Tokens, heads * value_dim);
        let from = (sorted, rank, "attended-by-head-blocks");
        of_heads.product("attn_v_b", from, (made, value_dim), program);
        program.step("merge");
        let values = program.values("values", Rows::Tokens, heads * value_dim);
        let from = (made, HeadRows::by_head(value_dim, 0));
        let to = (values, HeadRows::by_token(value_dim, 0));
        program.columns(from, to, heads, value_dim);
        values
    }
}

impl OfHeads {
    /// `output = W_h input`, rows of each head one after another.
    fn product(
        &self,
        part: &'static str,
        (input, columns, blocks): (Slot, usize, &'static str),
        (output, rows): (Slot, usize),
        program: &mut Builder,
    ) {
        let Self { routing, routes } = self;
        let matrices = program.expert_matrices(part, routing, [rows, columns], Bias::IfPresent);
        let from = (input, ExpertInput::Choices, columns);
        let outputs = vec![(matrices, output)];
        program.expert_product(routing, *routes, from, blocks, outputs);
    }
}

impl Latent {
    /// Elements of a head of queries before they are made queries of latent rows.
    fn query_dim(&self, attention: &Attention) -> usize {
        self.key_dim + attention.head_dim - self.rank
    }
}
