//! Which layers a device computes, and what it has of a plan then.
//!
//! The last layers are the device's, and the output with them; the processor computes those before, and hands the residual
//! stream over once in a pass. Where it is not said how many, they are as many as there is memory for: of the device, for
//! their weights, activations and KV rows, and under the budget of the process, as far as the device's bytes count there.

use std::sync::Arc;

use lacuna_kv::{Geometry, KvCache, KvError};
use lacuna_models::plan::{Budget, DevicePlan, KvPlan, Plan};
use lacuna_models::{ComputeDevice, DeviceLayers, ExecutorError, ExecutorMemory, Model, ModelSpec};
use lacuna_pages::ByteLength;
use lacuna_pages::device::Commitment;

use super::EngineConfig;
use crate::error::EngineError;
use crate::status::DeviceStatus;

/// Where layers are computed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Placed {
    /// How many of the first the processor computes beside a device.
    pub(super) host_layers: usize,
    /// What that is in the plan.
    pub(super) device: DevicePlan,
}

/// Where it is not said how many layers a device computes, this part of its memory, and of the budget, is left to KV rows,
/// unless one whole context takes less: without any, the first long conversation would find it full, and with room for a
/// whole context, models that are made for very long ones would run on the processor.
const KV_SHARE: u64 = 4;

impl EngineConfig {
    /// Before a model is loaded, as far as it is known.
    pub(super) fn placed(&self, spec: &ModelSpec) -> Placed {
        let host_layers = match (&self.device, self.device_layers) {
            (Some(_), DeviceLayers::Last(layers)) => spec.layers.len().saturating_sub(layers.get()),
            _ => 0,
        };
        Placed {
            host_layers,
            ..Placed::default()
        }
    }

    /// What a device would have of a loaded model that runs with this, if one is to compute; nothing is brought there.
    ///
    /// # Errors
    /// [`EngineError`], as [`Engine::new`](super::Engine::new).
    pub fn planned_device(&self, model: &Arc<Model>) -> Result<Option<PlannedDevice>, EngineError> {
        let Some(device) = &self.device else {
            return Ok(None);
        };
        let placed = self.place(model, 0)?;
        let weights = model.weight_plan().clone();
        let (cache, plan, _) = self.prepare(model.files(), model.spec(), weights, 0, placed)?;
        let geometry = cache.geometry();
        let own = KvPlan {
            geometry: geometry.without_host_layers(),
            ..plan.kv.clone()
        };
        let kv = match own.geometry.has_rows() || own.geometry.has_states() {
            true => own.committed_bytes(own.context_tokens),
            false => 0,
        };
        Ok(Some(PlannedDevice {
            plan: plan.device,
            status: DeviceStatus {
                name: device.name().to_owned(),
                layers: geometry.layers().len() - geometry.host_layers(),
                host_layers: geometry.host_layers(),
                memory: device.memory_for(model, geometry, &plan.arena)?,
                kv: ByteLength::new(kv),
            },
            cache,
        }))
    }

    /// Where the layers of a loaded model are computed.
    ///
    /// # Errors
    /// [`EngineError::Executor`] for what the device does not run, or has no memory for.
    pub(super) fn place(
        &self,
        model: &Arc<Model>,
        image_bytes: u64,
    ) -> Result<Placed, EngineError> {
        let spec = model.spec();
        let first = self.placed(spec);
        let Some(device) = &self.device else {
            return Ok(first);
        };
        let weights = model.weight_plan().clone();
        let (cache, plan, budget) =
            self.prepare(model.files(), spec, weights, image_bytes, first)?;
        let capabilities = cache.pool().capabilities();
        let heap_bytes = match capabilities.commitment {
            Commitment::PerHeap => cache.pool().heap_bytes().get(),
            Commitment::PerPage | Commitment::WithReservation => 1,
        };
        let heap_limit = capabilities.heap_limit;
        let placing = Placing {
            device: &**device,
            model,
            heap_bytes,
            most_heap_bytes: heap_limit.map(|heaps| heaps.saturating_mul(heap_bytes)),
            counts: self.budget.is_some() || !device.has_own_memory(),
            plan: &plan,
            budget: &budget,
        };
        // As many as there is memory for; or else as few as can be, with what the first token takes of KV rows.
        let all = 0..spec.layers.len();
        let tried: Vec<(usize, Rows)> = match self.device_layers {
            DeviceLayers::Last(_) => vec![(first.host_layers, Rows::First)],
            DeviceLayers::Fitting => {
                let roomy = all.clone().map(|layers| (layers, Rows::Share));
                roomy
                    .chain(all.rev().map(|layers| (layers, Rows::First)))
                    .collect()
            }
        };
        let mut refusals = Vec::new();
        for (host_layers, rows) in tried {
            match placing.behind(cache.geometry(), host_layers, rows) {
                Ok(placed) => return Ok(placed),
                Err(error) if !is_want_of_memory(&error) && !cannot_be_cut(&error) => {
                    return Err(error);
                }
                Err(error) if rows == Rows::First => refusals.push(error),
                Err(_) => {}
            }
        }
        // What a cut in the wrong place is refused for is no news where memory is what is wanting.
        let told = refusals.iter().position(is_want_of_memory).unwrap_or(0);
        match refusals.is_empty() {
            true => Ok(first),
            false => Err(refusals.swap_remove(told)),
        }
    }
}

/// What a device would have of a model.
#[derive(Debug)]
pub struct PlannedDevice {
    /// Its part of the plan.
    pub plan: DevicePlan,
    /// What it would say of itself with every context full.
    pub status: DeviceStatus,
    /// The KV cache that the model would run with, empty.
    pub cache: KvCache,
}

/// What is left to KV rows beside what a device has of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// What the first token takes.
    First,
    /// [`KV_SHARE`], or one whole context.
    Share,
}

impl Rows {
    /// How much of `room` bytes that is, where the first rows take `first` and those of a context `whole`.
    fn kept(self, (first, whole): (u64, u64), room: u64) -> u64 {
        match self {
            Self::Share => whole.min(room / KV_SHARE).max(first),
            Self::First => first,
        }
    }
}

fn is_want_of_memory(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::Executor(ExecutorError::Memory { .. }) | EngineError::ProcessTooLarge { .. }
    )
}

fn cannot_be_cut(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::Executor(ExecutorError::Split { .. })
            | EngineError::Kv(KvError::SplitRows { .. })
    )
}

/// What decides about a place to cut a model.
struct Placing<'a> {
    device: &'a dyn ComputeDevice,
    model: &'a Arc<Model>,
    /// Bytes in which the device has memory for KV pages.
    heap_bytes: u64,
    /// The most of it for these, where kernels reach so much.
    most_heap_bytes: Option<u64>,
    /// Whether bytes on the device are under the budget.
    counts: bool,
    /// With nothing on the device.
    plan: &'a Plan,
    budget: &'a Budget,
}

impl Placing<'_> {
    /// The first `host_layers` layers on the processor.
    fn behind(
        &self,
        geometry: &Geometry,
        host_layers: usize,
        rows: Rows,
    ) -> Result<Placed, EngineError> {
        let geometry = geometry.clone().with_host_layers(host_layers)?;
        let memory = self
            .device
            .memory_for(self.model, &geometry, &self.plan.arena)?;
        let most_kv_bytes = match self.device.free_bytes() {
            None => None,
            Some(free) => self.most_kv(&geometry, memory, (free, rows))?,
        };
        let bytes = match self.counts {
            true => self.counted(memory, host_layers),
            false => 0,
        };
        let (kv, least) = (&self.plan.kv, self.plan.least());
        let room = self.budget.parts.kv_bytes;
        let whole = kv.sequence_peak_bytes(kv.context_tokens);
        let kept = rows.kept((least.kv_bytes, whole), room);
        if kept + bytes > room {
            return Err(EngineError::ProcessTooLarge {
                needed: ByteLength::new(least.bytes() + bytes),
            });
        }
        Ok(Placed {
            host_layers,
            device: DevicePlan {
                bytes,
                most_kv_bytes,
            },
        })
    }

    /// Bytes of KV pages in all that there are before those of the device's layers fill `free` bytes of its memory; `None`
    /// where these have none.
    fn most_kv(
        &self,
        geometry: &Geometry,
        memory: ExecutorMemory,
        (free, rows): (u64, Rows),
    ) -> Result<Option<u64>, EngineError> {
        let own = KvPlan {
            geometry: geometry.without_host_layers(),
            ..self.plan.kv.clone()
        };
        let most_pages = self.most_heap_bytes.unwrap_or(u64::MAX);
        let free = free.min(memory.bytes().saturating_add(most_pages));
        let has_pages = own.geometry.has_rows() || own.geometry.has_states();
        let of_own = |tokens| match has_pages {
            true => own.sequence_peak_bytes(tokens),
            false => 0,
        };
        let context = self.plan.kv.context_tokens;
        let (first, whole) = (of_own(1), of_own(context));
        let kept = rows.kept((first, whole), free);
        let needed_bytes = memory.bytes() + kept.next_multiple_of(self.heap_bytes);
        if needed_bytes > free {
            return Err(EngineError::Executor(ExecutorError::Memory {
                device: self.device.name().to_owned(),
                layers: geometry.layers().len() - geometry.host_layers(),
                needed_bytes,
                free_bytes: free,
            }));
        }
        let room = u128::from(free - memory.bytes());
        let all = u128::from(self.plan.kv.sequence_peak_bytes(context));
        let most = (room * all).checked_div(u128::from(whole));
        Ok(most.map(|most| u64::try_from(most).unwrap_or(u64::MAX)))
    }

    /// Bytes on the device that nothing else in the plan stands for.
    fn counted(&self, memory: ExecutorMemory, host_layers: usize) -> u64 {
        // Where the processor computes nothing, activations on the device take the place of those that are planned for it.
        let planned = match host_layers {
            0 => self.plan.arena.bytes() as u64,
            _ => 0,
        };
        let activations = memory.activation_bytes.saturating_sub(planned);
        memory.weight_bytes + memory.staging_bytes + activations
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::path::Path;

    use lacuna_files::ModelFiles;
    use lacuna_kv::KvPolicy;
    use lacuna_models::Executor;
    use lacuna_models::plan::ArenaPlan;
    use lacuna_pages::{HostDevice, SplitDevice};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A device that has room for so many bytes, of which each layer takes ten mebibytes and the output one.
    #[derive(Debug)]
    struct Card {
        free: u64,
        has_own_memory: bool,
    }

    impl ComputeDevice for Card {
        fn name(&self) -> &'static str {
            "card"
        }

        fn reopened(&self) -> Result<Arc<dyn ComputeDevice>, ExecutorError> {
            unreachable!("nothing is lost")
        }

        fn free_bytes(&self) -> Option<u64> {
            Some(self.free)
        }

        fn has_own_memory(&self) -> bool {
            self.has_own_memory
        }

        fn kv_cache(&self, geometry: Geometry, policy: KvPolicy) -> Result<KvCache, ExecutorError> {
            let device = SplitDevice::new(HostDevice::new()?)?;
            Ok(KvCache::on_device(device, geometry, policy)?)
        }

        fn memory_for(
            &self,
            model: &Arc<Model>,
            geometry: &Geometry,
            _: &ArenaPlan,
        ) -> Result<ExecutorMemory, ExecutorError> {
            let layers = model.spec().layers.len() - geometry.host_layers();
            Ok(ExecutorMemory {
                weight_bytes: (10 * layers as u64 + 1) * MIB,
                ..ExecutorMemory::default()
            })
        }

        fn executor(
            &self,
            _: Arc<Model>,
            _: &Geometry,
            _: &ArenaPlan,
        ) -> Result<Box<dyn Executor>, ExecutorError> {
            unreachable!("nothing is computed")
        }

        fn measure_copies(&self) -> Result<f64, ExecutorError> {
            unreachable!("nothing is measured")
        }
    }

    fn demo() -> Arc<Model> {
        Arc::new(Model::load(lacuna_models::demo()).expect("it is built in"))
    }

    fn config(free: u64, device_layers: DeviceLayers) -> EngineConfig {
        EngineConfig {
            context_tokens: Some(256),
            batch_tokens: 64,
            device: Some(Arc::new(Card {
                free,
                has_own_memory: false,
            })),
            device_layers,
            ..EngineConfig::default()
        }
    }

    fn last(layers: usize) -> DeviceLayers {
        DeviceLayers::Last(NonZeroUsize::new(layers).expect("some"))
    }

    /// The layers that stay on the processor.
    fn host_layers(config: &EngineConfig) -> Result<usize, EngineError> {
        config.place(&demo(), 0).map(|placed| placed.host_layers)
    }

    #[test]
    fn as_many_layers_are_on_a_device_as_it_has_memory_for() {
        // The demo's four take 41 MiB, and KV rows of each less than one.
        for (free, layers) in [(100, 0), (45, 0), (41, 1), (32, 1), (31, 2), (12, 3)] {
            let config = config(free * MIB, DeviceLayers::Fitting);
            assert_eq!(host_layers(&config).expect("some"), layers, "{free} MiB");
        }
        let none = host_layers(&config(11 * MIB, DeviceLayers::Fitting));
        let told = none.expect_err("no room for rows of one").to_string();
        assert!(told.contains("1 of the last layers take"), "{told}");
        assert!(told.contains("smaller batches"), "{told}");
    }

    #[test]
    fn so_many_layers_are_on_a_device_as_were_asked_for_or_it_says_why_not() {
        for (asked, on_processor) in [(1, 3), (3, 1), (4, 0), (99, 0)] {
            let config = config(100 * MIB, last(asked));
            assert_eq!(host_layers(&config).expect("room"), on_processor);
        }
        let refused = host_layers(&config(30 * MIB, last(3)));
        let refused = refused.expect_err("they take 31 MiB");
        let EngineError::Executor(ExecutorError::Memory {
            layers,
            needed_bytes,
            free_bytes,
            ..
        }) = refused
        else {
            panic!("{refused}")
        };
        assert_eq!((layers, free_bytes), (3, 30 * MIB));
        assert!(needed_bytes > 31 * MIB);
    }

    #[test]
    fn a_budget_counts_what_is_on_a_device_and_memory_of_a_card_is_not_the_systems() {
        let with = |budget: Option<u64>, has_own_memory| EngineConfig {
            budget: budget.map(ByteLength::mebibytes),
            device: Some(Arc::new(Card {
                free: 100 * MIB,
                has_own_memory,
            })),
            ..config(0, DeviceLayers::Fitting)
        };
        for has_own_memory in [false, true] {
            let placed = with(Some(48), has_own_memory).place(&demo(), 0);
            let placed = placed.expect("room for some");
            assert!((1..4).contains(&placed.host_layers), "{placed:?}");
            let layers = 4 - placed.host_layers as u64;
            assert!(placed.device.bytes >= 10 * layers * MIB - MIB);
        }
        let placed = with(None, true).place(&demo(), 0).expect("room");
        assert_eq!((placed.host_layers, placed.device.bytes), (0, 0));
        let refused = with(Some(24), false).place(&demo(), 0);
        assert!(matches!(refused, Err(EngineError::ProcessTooLarge { .. })));
    }

    /// What is left of 45 MiB beside 41, all of which rows of four layers may fill; of a split, as much again for the rest.
    #[test]
    fn kv_pages_get_no_more_than_keeps_those_of_a_device_in_its_memory() {
        let of = |free: u64, layers| {
            let placed = config(free * MIB, layers).place(&demo(), 0);
            placed.expect("room").device.most_kv_bytes
        };
        assert_eq!(of(45, DeviceLayers::ALL), Some(4 * MIB));
        assert_eq!(of(25, last(2)), Some(2 * 4 * MIB));
    }

    /// Room for 14 MiB of rows beside 41, of which kernels reach so many bytes.
    #[test]
    fn kv_pages_get_no_more_than_kernels_reach() {
        let (config, model) = (config(55 * MIB, DeviceLayers::ALL), demo());
        let (spec, weights) = (model.spec(), model.weight_plan().clone());
        let first = config.placed(spec);
        let prepared = config.prepare(model.files(), spec, weights, 0, first);
        let (cache, plan, budget) = prepared.expect("room");
        let with = |most_heap_bytes| {
            let placing = Placing {
                device: &**config.device.as_ref().expect("a card"),
                model: &model,
                heap_bytes: 1,
                most_heap_bytes,
                counts: false,
                plan: &plan,
                budget: &budget,
            };
            placing.behind(cache.geometry(), 0, Rows::First)
        };
        let of = |most| with(most).expect("room").device.most_kv_bytes;
        assert_eq!(of(None), Some(14 * MIB));
        assert_eq!(of(Some(20 * MIB)), Some(14 * MIB));
        assert_eq!(of(Some(5 * MIB)), Some(5 * MIB));
        let refused = with(Some(1)).expect_err("the first rows take more");
        assert!(is_want_of_memory(&refused), "{refused}");
    }

    #[test]
    fn a_model_whose_last_layers_read_rows_of_others_is_cut_where_it_can_be() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../reference/families/gemma4/model.gguf");
        let files = ModelFiles::open(&path).expect("a committed fixture");
        let model = Arc::new(Model::load(files).expect("the fixture loads"));
        let place = |free: u64, layers| config(free * MIB, layers).place(&model, 0);
        let placed = place(75, DeviceLayers::Fitting).expect("room for seven of eight");
        assert_eq!(placed.host_layers, 1);
        let refused = place(35, DeviceLayers::Fitting).expect_err("six at least");
        assert!(is_want_of_memory(&refused), "{refused}");
        let refused = place(100, last(3)).expect_err("layer 5 reads the rows of layer 3");
        assert!(cannot_be_cut(&refused), "{refused}");
    }
}
