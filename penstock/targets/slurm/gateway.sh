give_up() { echo "penstock: $*"; exit 1; }
@prologue@
export PENSTOCK_RUN=@run@ PENSTOCK_RUN_ID="$1" PENSTOCK_ROLE=gateway
hosts=$(@python@ -m penstock.hardware.network @seen_from@)
# In place of the shell, so that a signal to the batch step reaches the gateway.
exec @python@ -m penstock.gateway @run@/gateway.json --address @run@/gateway/address.json --unit "$2" --hosts $hosts
