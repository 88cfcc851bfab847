from data import CLASSES, load
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.linear_model import SGDClassifier

app = ClientApp()


@app.train()
def fit(msg: Message, context: Context) -> Message:
    x, y = load(context.node_config["partition-id"])
    model = SGDClassifier(
        loss="log_loss",
        learning_rate="constant",
        eta0=context.run_config["lr"],
        random_state=msg.content["config"]["seed"] % 2**32,
    )
    model.partial_fit(x[:1], y[:1], classes=CLASSES)  # makes the arrays
    model.coef_ = msg.content["arrays"]["coef"].numpy().copy()
    model.intercept_ = msg.content["arrays"]["intercept"].numpy().copy()
    model.partial_fit(x, y)
    content = RecordDict(
        {
            "arrays": ArrayRecord(
                {"coef": Array(model.coef_), "intercept": Array(model.intercept_)}
            ),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
    )
    return Message(content=content, reply_to=msg)
