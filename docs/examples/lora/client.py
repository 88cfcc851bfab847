import torch
from example_task import Net, load_data, loss, train
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from fedpsa_strategy import fedpsa_mod

mod = fedpsa_mod(Net, loss_fn=loss, state_fn=get_peft_model_state_dict)
app = ClientApp(mods=[mod])


@app.train()
def fit(msg: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    config = context.run_config
    net = Net()
    set_peft_model_state_dict(net, msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(context.node_config["partition-id"])
    train_loss = train(net, x, y, config["lr"], config["local-epochs"])
    content = RecordDict(
        {
            "arrays": ArrayRecord(get_peft_model_state_dict(net)),
            "metrics": MetricRecord({"train_loss": train_loss, "num-examples": len(x)}),
        }
    )
    return Message(content=content, reply_to=msg)
